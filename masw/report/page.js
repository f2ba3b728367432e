// Draws the figures from the data beside them, in the colours of the page. Nothing is fetched.
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const figures = [...document.querySelectorAll("figure")].filter((f) => f.querySelector(".plot"));
  const SWAP = { "#1a1a1a": "#f0f0f0", "#e2e2e2": "#3a3f46", "#2a3f5f": "#f0f0f0", "#ebf0f8": "#3a3f46", "#555555": "#9a9fa6" };
  const PAPER = "#15181c", LEAST = 260, ROW = 140; // px of all axes together, and of each of several
  let chosen = null, drawing = 0;

  const dark = () => (chosen === null ? system.matches : chosen);

  // Ink, grid and paper of the light figures become those of the dark page; what stands on a light button stays.
  function swap(value, key) {
    if (typeof value === "string" && key === "bgcolor") return value.toLowerCase().replace(/^#fff(fff)?$/, PAPER).replace(/^rgba\(255, ?255, ?255,/, "rgba(21,24,28,");
    if (typeof value === "string") return (/color/i.test(key) && SWAP[value.toLowerCase()]) || value;
    if (Array.isArray(value)) return value.map((v) => swap(v, key));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, k === "updatemenus" ? v : swap(v, k)]));
    return value;
  }

  function outlined(traces) {
    for (const trace of traces || []) if (trace.cells?.fill?.color === "#ffffff") trace.cells.fill.color = PAPER; // a table's own paper
    for (const trace of traces || []) if (trace.marker && trace.marker.color === "#000000") trace.marker.line = { ...trace.marker.line, color: "#ffffff", width: 1 };
    return traces;
  }

  function themed(figure) {
    if (!dark()) return figure;
    const made = swap(figure, "");
    made.layout = { ...made.layout, paper_bgcolor: PAPER, plot_bgcolor: PAPER };
    outlined(made.data);
    for (const frame of made.frames || []) outlined(frame.data);
    return made;
  }

  function wrapped(text, room) {
    let line = "", lines = [];
    for (const word of text.replaceAll("<br>", " ").split(" ")) {
      if (line && (line + " " + word).length > room) { lines.push(line); line = word; } else line = line ? line + " " + word : word;
    }
    return [...lines, line].join("<br>");
  }

  const share = ({ domain }) => domain[1] - domain[0];

  // Axis titles break into lines where they would be cut off: `width` and `height` are the room of all axes together, in pixels.
  function broken(layout, full, width, height) {
    const found = {};
    for (const [key, axis] of Object.entries(layout)) {
      if (!/^[xy]axis/.test(key) || !axis.title?.text) continue;
      const room = key[0] === "x" ? width : height * share(full[key]);
      const text = wrapped(axis.title.text, room / 8.6);
      if (text !== axis.title.text) found[key + ".title.text"] = text;
    }
    return found;
  }

  // What the axes need once it is known what the legend, buttons and labels around them take on this page.
  async function fitted(plot) {
    const full = plot._fullLayout;
    if (!full._has("cartesian")) return;
    for (let pass = 0; pass < 2; pass++) { // titles on more lines take height again
      const { _size: size, height } = plot._fullLayout;
      const rows = Object.keys(full).filter((key) => /^yaxis\d*$/.test(key)).map((key) => share(full[key]));
      const least = Math.max(LEAST, ROW / Math.min(1, ...rows));
      const changes = broken(plot.layout, plot._fullLayout, size.w + 2 * Math.min(size.l, size.r), Math.max(size.h, least));
      if (size.h < least) changes.height = height + least - size.h;
      if (Object.keys(changes).length) await Plotly.relayout(plot, changes);
    }
  }

  // plotly's buttons are drawings: here they take the focus and answer to Enter and Space, also after they were drawn anew.
  const buttons = (plot) => [...plot.querySelectorAll(".updatemenu-button")];
  const name = (made) => made.textContent.replace(/[^a-z ]/gi, "").trim();
  // By name: their order changes while they are drawn anew.
  const named = (plot) => buttons(plot).find((made) => name(made) === plot.dataset.pressed);

  function reachable(plot) {
    for (const made of buttons(plot)) {
      made.setAttribute("tabindex", "0");
      made.setAttribute("role", "button");
      made.setAttribute("aria-label", name(made));
    }
    if (document.activeElement === document.body) named(plot)?.focus({ preventScroll: true });
  }

  // While a button is drawn anew nothing has the focus: a key that comes meanwhile is meant for it.
  const BY = { previous: -1, next: 1 };
  let last = null;

  function pressed(event) {
    if (event.key !== "Enter" && event.key !== " ") return;
    const made = event.target.closest?.(".updatemenu-button"), plot = made?.closest(".plot") ?? (event.target === document.body ? last : null);
    if (!plot) return;
    if (made) plot.dataset.pressed = name(made);
    last = plot;
    event.preventDefault();
    const slider = plot._fullLayout.sliders?.[0], by = BY[plot.dataset.pressed];
    // A button leads on from the frame it was drawn for, the slider knows the one that is shown.
    if (slider && by) {
      const step = slider.steps[slider.active + by];
      if (step) Plotly.animate(plot, ...step.args);
    } else named(plot)?.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  }

  function left(event) {
    if (event.type === "pointerdown" || !event.target.closest?.(".updatemenu-button")) last = null;
  }

  async function draw(element, turn) {
    const plot = element.querySelector(".plot");
    element.masw ??= JSON.parse(element.querySelector("script").textContent);
    const { data, layout, frames, config } = structuredClone(themed(element.masw));
    if (plot.data) Plotly.purge(plot);
    if (layout.meta?.min_width) plot.style.minWidth = layout.meta.min_width + "px"; // rather scroll than shrink letters
    const margin = layout.title ? { ...layout.margin, t: Math.max(16, (layout.margin?.t ?? 100) - 36) } : layout.margin;
    const shown = { ...layout, title: undefined, margin, width: undefined, autosize: true }; // the title stands above, as text
    await Plotly.newPlot(plot, { data, frames, layout: shown, config: { ...config, responsive: true, displaylogo: false, showSendToCloud: false } });
    await fitted(plot);
    reachable(plot);
    plot.on("plotly_afterplot", () => reachable(plot));
    const box = plot.parentElement;
    element.dataset.wide = String(box.scrollWidth > box.clientWidth + 2);
    element.dataset.drawn = String(turn);
  }

  // Those in sight first, then one at a time, so that the page can be read meanwhile.
  async function drawAll() {
    const turn = ++drawing;
    root.dataset.figures = "drawing";
    const away = (f) => { const box = f.getBoundingClientRect(); return box.bottom < 0 ? -box.bottom : Math.max(0, box.top - innerHeight); };
    const waiting = [...figures];
    while (waiting.length) {
      waiting.sort((a, b) => away(a) - away(b));
      const next = waiting.shift();
      try { await draw(next, turn); } catch (error) { console.error("figure " + next.id + ": " + error); }
      await new Promise((go) => setTimeout(go));
      if (turn !== drawing) return;
    }
    root.dataset.figures = "drawn";
  }

  function apply() {
    root.dataset.theme = dark() ? "dark" : "light";
    button.setAttribute("aria-pressed", String(dark()));
    drawAll();
  }

  let width = innerWidth, later = 0;
  function resized() {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(later);
    later = setTimeout(drawAll, 400);
  }

  addEventListener("resize", resized);
  document.addEventListener("keydown", pressed);
  document.addEventListener("pointerdown", left);
  document.addEventListener("focusin", left);
  button.addEventListener("click", () => { chosen = !dark(); apply(); });
  system.addEventListener("change", apply);
  apply();
})();
