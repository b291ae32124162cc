// The explorer: a list of images, and a panel per run for the image that is shown.

const PLAY_INTERVAL = 800; // ms per word
const SHORTEST_SIDE = 336; // least pixels of a map's shorter side: cells of the usual grids (7, 8, 14) have sharp edges
const WIDE = "(min-width: 900px)"; // where runs stand side by side from the start

class Explorer {
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.map = new AttentionMap(data.map);
    this.style = "smooth";
    this.kinds = Object.keys(data.attentions); // "alphas"; "evidence"; "head 1", "head 2", ..
    this.attention = this.kinds[0];
    this.opacity = 0.9;
    this.matrixOpen = false;
    this.selected = data.runs.length > 1 && matchMedia(WIDE).matches ? null : 0; // null: all runs, side by side
    this.current = -1;
    this.active = null;
    this.panels = [];
    this.player = null;
    this.states = new WeakMap();
    this.#build();
    document.addEventListener("keydown", (event) => this.#key(event));
    document.addEventListener("click", (event) => {
      const link = event.target.closest("[data-explore]");
      if (link) this.#openByName(link.dataset.explore);
    });
    this.filter("");
    if (data.images.length) this.open(0);
    else this.panelBox.append(element("p", {}, "There are no images to explore."));
  }

  /** Caption, word and pins of a run's panel. They are kept while another image or run is shown. */
  stateOf(run) {
    if (!this.states.has(run)) this.states.set(run, { caption: 0, word: run.start, pins: [] });
    return this.states.get(run);
  }

  #build() {
    const { images, runs } = this.data;
    this.search = element("input", {
      type: "search",
      placeholder: "Search captions",
      "aria-label": "Search captions, references and names",
      oninput: () => this.filter(this.search.value),
      onkeydown: (event) => this.#searchKey(event),
    });
    this.count = element("output", { class: "count" });
    this.items = images.map((image, index) =>
      element(
        "li",
        {
          role: "option",
          class: "item",
          tabindex: "-1",
          title: image.name,
          "data-index": index,
          onclick: () => this.open(index),
        },
        element("img", { src: image.view, alt: "", decoding: "async", width: image.width, height: image.height }),
        element("span", {}, image.runs[0]?.captions[0].words.join(" ") || image.name),
      ),
    );
    this.list = element(
      "ul",
      { class: "list", role: "listbox", "aria-label": "Images", onkeydown: (event) => this.#listKey(event) },
      ...this.items,
    );
    this.position = element("span", { class: "position" });
    this.name = element("h2", {});
    const stepButton = (direction, name, key, sign) =>
      button(
        {
          class: name.toLowerCase(),
          "aria-label": `${name} image`,
          title: `${name} image (${key})`,
          onclick: () => this.step(direction),
        },
        sign,
      );
    this.runButtons = [null, ...runs.keys()].map((run) =>
      button(
        {
          class: "run",
          "data-run": run ?? "all",
          title: run === null ? "All runs side by side (0)" : `${runs[run]} (${run + 1})`,
          onclick: () => this.showRun(run),
        },
        run === null ? "All runs" : runs[run],
      ),
    );
    this.styleButtons = ["smooth", "cells"].map((style) =>
      button(
        { class: "style", "data-style": style, title: "Smooth map or cells (S)", onclick: () => this.setStyle(style) },
        style === "smooth" ? "Smooth" : "Cells",
      ),
    );
    this.attentionButtons = this.kinds.map((kind) =>
      button(
        {
          class: "attention",
          "data-attention": kind,
          title: "Which attention is shown (A)",
          onclick: () => this.setAttention(kind),
        },
        this.data.attentions[kind],
      ),
    );
    this.slider = element("input", {
      type: "range",
      min: 0,
      max: 100,
      value: 100 * this.opacity,
      "aria-label": "Opacity of the map",
      oninput: () => {
        this.opacity = this.slider.value / 100;
        this.panels.forEach((panel) => panel.draw());
      },
    });
    this.playButton = button({ class: "play", title: "Play through the words (space)", onclick: () => this.play() });
    this.panelBox = element("div", { class: "panels" });
    this.references = element("ul", {});
    this.referenceBox = element(
      "details",
      { class: "references", open: true },
      element("summary", {}, "References"),
      this.references,
    );
    this.status = element("p", { class: "spoken", role: "status", "aria-live": "polite" });
    const several = runs.length > 1;
    this.root.classList.toggle("single", images.length === 1);
    const hasChoice = this.kinds.length > 1;
    const group = (name, label, items) =>
      element("div", { class: `group ${name}`, role: "group", "aria-label": label }, ...items);
    const keys = [
      ["← →", "words"],
      ["Enter", "pin up to two words"],
      ["Esc", "unpin"],
      ...(several ? [[`1 … ${Math.min(9, runs.length)}`, "one run"], ["0", "all runs"]] : []),
      ["B", "next caption of the beam"],
      ...(images.length > 1 ? [["P N", "images"]] : []),
      ["S", "smooth or cells"],
      ...(hasChoice ? [["A", "evidence" in this.data.attentions ? "where the word came from" : "which attention"]] : []),
      ["Space", "play"],
      ...(images.length > 1 ? [["/", "search"]] : []),
    ];
    this.root.append(
      element("aside", {}, element("div", { class: "search" }, this.search, this.count), this.list),
      element(
        "div",
        { class: "main" },
        element(
          "div",
          { class: "heading" },
          element("div", { class: "turn" }, stepButton(-1, "Previous", "P", "‹"), this.position, stepButton(1, "Next", "N", "›")),
          this.name,
        ),
        element(
          "div",
          { class: "controls" },
          several ? group("runs", "Runs", this.runButtons) : null,
          hasChoice ? group("attentions", "Attention", this.attentionButtons) : null,
          group("styles", "Map", this.styleButtons),
          element("label", { class: "opacity" }, "Map ", this.slider),
          this.playButton,
        ),
        this.panelBox,
        this.referenceBox,
        element(
          "p",
          { class: "note" },
          "The bar under a word is its probability: a full bar is certain, and a word with a dotted line has a " +
            `probability below ${UNSURE_BELOW}. The bar under a picture is the scale of the caption's maps, attention per ` +
            "location; its tick is even attention.",
          "evidence" in this.data.attentions
            ? " Where it looked: the attention before the word. Where the word came from: the locations whose content speaks for it."
            : "",
        ),
        element(
          "p",
          { class: "keys" },
          ...keys.map(([key, action]) => element("span", {}, element("kbd", {}, key), ` ${action}`)),
        ),
        this.status,
      ),
    );
    this.setStyle(this.style);
    this.setAttention(this.attention);
    this.play(false);
  }

  async open(index) {
    if (index === this.current) return;
    this.play(false);
    this.current = index;
    const image = this.data.images[index];
    this.name.textContent = image.name;
    this.items.forEach((item, k) => {
      item.setAttribute("aria-selected", String(k === index));
      item.tabIndex = k === index ? 0 : -1;
    });
    this.#scrollTo(this.items[index], this.list);
    this.#updateCount();
    this.references.replaceChildren(...image.references.map((text) => element("li", {}, text)));
    this.referenceBox.hidden = image.references.length === 0;
    this.#showPanels();
    if (image.pixels) return;
    image.pixels = await this.#readPixels(image);
    this.panels.forEach((panel) => panel.draw());
  }

  /** Scroll an item's container alone: scrollIntoView would move the page too. */
  #scrollTo(item, container) {
    const [box, outer] = [item.getBoundingClientRect(), container.getBoundingClientRect()];
    container.scrollTop += Math.min(0, box.top - outer.top) + Math.max(0, box.bottom - outer.bottom);
    container.scrollLeft += Math.min(0, box.left - outer.left) + Math.max(0, box.right - outer.right);
  }

  async #readPixels(image) {
    const picture = new Image();
    picture.src = image.view;
    await picture.decode();
    const scale = Math.max(1, SHORTEST_SIDE / Math.min(image.width, image.height));
    image.width = Math.round(image.width * scale);
    image.height = Math.round(image.height * scale);
    const canvas = element("canvas", { width: image.width, height: image.height });
    const drawing = canvas.getContext("2d");
    drawing.imageSmoothingQuality = "high";
    drawing.drawImage(picture, 0, 0, image.width, image.height);
    return drawing.getImageData(0, 0, image.width, image.height);
  }

  #openByName(name) {
    const index = this.data.images.findIndex((image) => image.name === name);
    if (index < 0) return;
    this.open(index);
    this.root.scrollIntoView({ block: "start" });
  }

  #showPanels() {
    const image = this.data.images[this.current];
    const hadFocus = this.panelBox.contains(document.activeElement);
    const runs = image.runs.filter((run) => this.selected === null || run.run === this.data.runs[this.selected]);
    this.panels = runs.map((run) => new Panel(this, image, run));
    this.panelBox.replaceChildren(...this.panels.map((panel) => panel.root));
    if (!runs.length) {
      this.panelBox.append(element("p", {}, `${this.data.runs[this.selected] ?? "No run"} has no caption of this image.`));
    }
    this.panelBox.style.setProperty("--panels", Math.max(1, this.panels.length));
    this.runButtons.forEach((item, k) => {
      const isShown = this.selected === (k ? k - 1 : null);
      item.setAttribute("aria-pressed", String(isShown));
      if (isShown && item.parentElement) this.#scrollTo(item, item.parentElement);
    });
    this.active = null;
    if (this.panels.length) this.activate(this.panels[0]);
    if (hadFocus) this.active?.focusWord();
  }

  /** Show one run, or all runs side by side (null), at the word that was shown before. */
  showRun(run) {
    if (run === this.selected || run >= this.data.runs.length) return;
    const before = this.active;
    this.play(false);
    this.selected = run;
    if (this.current < 0) return;
    this.#showPanels();
    const same = this.panels.find((panel) => panel.run === before?.run);
    if (same) {
      const hadFocus = this.panelBox.contains(document.activeElement);
      this.activate(same);
      if (hadFocus) same.focusWord();
    }
    if (before) this.follow(before);
  }

  activate(panel) {
    if (panel === this.active || !this.panels.includes(panel)) return;
    this.active = panel;
    this.panels.forEach((other) => other.root.classList.toggle("active", this.panels.length > 1 && other === panel));
  }

  /** Let the other panels show the word that ``panel`` shows, where their captions have it. */
  follow(panel) {
    const { words } = panel.caption;
    const word = words[panel.state.word];
    const occurrence = words.slice(0, panel.state.word).filter((other) => other === word).length;
    for (const other of this.panels) {
      if (other.run === panel.run) continue;
      const steps = [...other.caption.words.keys()].filter((step) => other.caption.words[step] === word);
      const step = steps[Math.min(occurrence, steps.length - 1)];
      if (step !== undefined) other.show(step, { lead: false });
    }
  }

  /** Mark a location in every panel with the same grid; null removes the marks. */
  markLocation(panel, location) {
    for (const other of this.panels) {
      const isSameGrid = other.run.rows === panel.run.rows && other.run.columns === panel.run.columns;
      other.mark(isSameGrid ? location : null);
    }
  }

  setStyle(style) {
    this.style = style;
    this.styleButtons.forEach((item) => item.setAttribute("aria-pressed", String(item.dataset.style === style)));
    this.panels.forEach((panel) => panel.draw());
  }

  /** Show one kind of attention. Captions without it show their alphas. */
  setAttention(kind) {
    this.attention = kind;
    this.attentionButtons.forEach((item) => item.setAttribute("aria-pressed", String(item.dataset.attention === kind)));
    this.panels.forEach((panel) => panel.redraw());
  }

  /** Go through the words of the active panel, from the first one if the last is shown; false stops. */
  play(starts = this.player === null) {
    clearInterval(this.player);
    this.player = null;
    if (starts && this.active?.caption.words.length) {
      const step = () => {
        const { state, caption } = this.active;
        if (state.word >= caption.words.length - 1) this.play(false);
        else this.active.move(1);
      };
      if (this.active.state.word >= this.active.caption.words.length - 1) this.active.show(0);
      this.player = setInterval(step, PLAY_INTERVAL);
    }
    this.playButton.setAttribute("aria-pressed", String(this.player !== null));
    const [sign, text] = this.player === null ? ["▶", "Play"] : ["■", "Stop"];
    this.playButton.setAttribute("aria-label", text);
    this.playButton.replaceChildren(sign, element("span", {}, ` ${text}`));
  }

  announce(text) {
    this.status.textContent = text;
  }

  /** List the images whose names, captions and references have all words of the search. */
  filter(text) {
    const searchWords = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.matching = this.data.images.flatMap((image, index) => {
      image.text ??= [
        image.name,
        ...image.references,
        ...image.runs.flatMap((run) => run.captions.map((caption) => caption.words.join(" "))),
      ].join("\n").toLowerCase();
      const matches = searchWords.every((word) => image.text.includes(word));
      this.items[index].hidden = !matches;
      return matches ? [index] : [];
    });
    this.#updateCount();
    if (this.matching.length && this.current >= 0 && !this.matching.includes(this.current)) this.open(this.matching[0]);
  }

  #updateCount() {
    const { images } = this.data;
    const allMatch = this.matching.length === images.length;
    const noun = images.length === 1 ? "image" : "images";
    this.count.textContent = allMatch ? `${images.length} ${noun}` : `${this.matching.length} of ${images.length}`;
    const index = this.matching.indexOf(this.current);
    this.position.textContent = `${index < 0 ? "–" : index + 1} / ${this.matching.length}`;
  }

  /** Open the next or previous image that matches the search. */
  step(direction) {
    const ahead = this.matching.filter((index) => (direction > 0 ? index > this.current : index < this.current));
    if (ahead.length) this.open(direction > 0 ? ahead[0] : ahead[ahead.length - 1]);
  }

  #listKey(event) {
    const directions = { ArrowDown: 1, ArrowUp: -1 };
    if (!(event.key in directions)) return;
    event.preventDefault();
    event.stopPropagation();
    this.step(directions[event.key]);
    this.items[this.current].focus({ preventScroll: true });
  }

  #searchKey(event) {
    if (event.key === "Escape") {
      this.search.value = "";
      this.filter("");
    } else if (event.key === "Enter" || event.key === "ArrowDown") {
      event.preventDefault();
      if (!this.matching.length) return;
      if (event.key === "Enter") this.active?.focusWord();
      else this.items[this.current].focus({ preventScroll: true });
    }
  }

  #key(event) {
    const { target, key } = event;
    if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented) return;
    if ((target !== document.body && !this.root.contains(target)) || !this.root.checkVisibility()) return;
    if (target.matches("input, select, textarea")) return;
    if (this.#act(key.toLowerCase(), target.matches("button, summary, a"))) event.preventDefault();
  }

  /** Do what a key stands for. Returns whether the key stands for anything. */
  #act(key, isOnButton) {
    const panel = this.active;
    if (/^[1-9]$/.test(key)) this.showRun(Number(key) - 1);
    else if (key === "0" && this.data.runs.length > 1) this.showRun(null);
    else if (key === "/" && this.data.images.length > 1) this.search.focus();
    else if (key === "n") this.step(1);
    else if (key === "p") this.step(-1);
    else if (key === "s") this.setStyle(this.style === "smooth" ? "cells" : "smooth");
    else if (key === "a") this.setAttention(this.kinds[(this.kinds.indexOf(this.attention) + 1) % this.kinds.length]);
    else if (key === " " && !isOnButton) this.play();
    else if (!panel) return false;
    else if (key === "arrowright") panel.move(1);
    else if (key === "arrowleft") panel.move(-1);
    else if (key === "home") panel.move(-Infinity);
    else if (key === "end") panel.move(Infinity);
    else if (key === "enter" && !isOnButton) panel.pin();
    else if (key === "escape") panel.unpin();
    else if (key === "b") panel.showCaption((panel.state.caption + 1) % panel.run.captions.length);
    else return false;
    return true;
  }
}

const root = document.currentScript.closest(".explorer");
root.explorer = new Explorer(root, JSON.parse(root.querySelector(".explorer-data").textContent));
