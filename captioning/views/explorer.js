// The explorer: a list of images, and for the image shown a panel per run. Text reaches the page as text nodes alone.

const SHORTEST_SIDE = 448; // pixels of a drawn map; smaller views are enlarged so that cells have sharp edges
const PLAY_INTERVAL = 800; // ms per word
const WIDE = "(min-width: 900px)"; // where runs stand side by side from the start

/** An element with attributes ("onclick" and the like are listeners; null and false are left out) and children. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function button(attributes, ...children) {
  return element("button", { type: "button", ...attributes }, ...children);
}

/** "1" of many, for numbers that have long tails. */
function short(value, digits = 2) {
  return value === null ? "–" : Number(value).toFixed(digits).replace("-", "−");
}

/** The index in 0..count-1 of a pointer along one side of an element. */
function along(position, start, length, count) {
  return Math.max(0, Math.min(count - 1, Math.floor(((position - start) / length) * count)));
}

/** One run's caption of the image shown: picture, words, other captions of its beam, alignment matrix. */
class Panel {
  constructor(explorer, image, look) {
    this.explorer = explorer;
    this.image = image;
    this.look = look;
    this.locations = look.rows * look.columns;
    this.place = explorer.placeOf(look);
    this.canvas = element("canvas", { role: "img" });
    this.chosenFrame = element("div", { class: "frame chosen", hidden: true });
    this.hereFrame = element("div", { class: "frame here", hidden: true });
    this.stage = element(
      "div",
      {
        class: "stage",
        onpointermove: (event) => this.#pointAtPicture(event),
        onpointerdown: (event) => this.#pointAtPicture(event),
        onpointerleave: (event) => this.#leaveLocation(event),
      },
      this.canvas,
      this.chosenFrame,
      this.hereFrame,
    );
    this.words = element("div", {
      class: "words",
      role: "toolbar",
      "aria-label": `Words of the caption by ${look.run}`,
      onpointerover: (event) => this.#overWord(event),
      onpointerleave: () => this.rest(),
      onfocusin: (event) => this.#overWord(event),
      onclick: (event) => this.#clickWord(event),
    });
    this.details = element("p", { class: "details" });
    this.beam = element("ol", { class: "beam", "aria-label": `Captions of the beam of ${look.run}, best first` });
    this.labels = element("div", { class: "labels", "aria-hidden": "true" });
    this.matrix = element("canvas", {
      class: "matrix",
      role: "img",
      tabindex: "0",
      onkeydown: (event) => this.#matrixKey(event),
      onpointermove: (event) => this.#pointAtMatrix(event),
      onpointerdown: (event) => this.#pointAtMatrix(event),
      onpointerleave: (event) => this.#leaveMatrix(event),
      onclick: () => this.pin(),
    });
    this.rowMark = element("div", { class: "mark row" });
    this.columnMark = element("div", { class: "mark column", hidden: true });
    const numbers = Object.entries(look.numbers).map(([name, value]) =>
      element("span", { class: "number" }, `${name} `, element("b", {}, typeof value === "string" ? value : short(value, 3))),
    );
    this.root = element(
      "article",
      { class: "panel", "data-run": look.run, onpointerenter: () => explorer.activate(this), onfocusin: () => explorer.activate(this) },
      element("header", {}, element("h3", {}, look.run), ...numbers),
      element(
        "div",
        { class: "body" },
        this.stage,
        element(
          "div",
          { class: "reading" },
          this.words,
          this.details,
          element("h4", {}, "Beam, with scores"),
          this.beam,
          element("h4", {}, "Words × locations"),
          element(
            "div",
            { class: "alignment" },
            this.labels,
            element("div", { class: "grid" }, this.matrix, element("div", { class: "lines" }), this.rowMark, this.columnMark),
            element("div", { class: "axis" }, element("span", {}, "top of the image"), element("span", {}, "bottom")),
          ),
        ),
      ),
    );
    this.#fillBeam();
    this.showCaption(this.place.caption, { ...this.place, lead: false });
  }

  get caption() {
    return this.look.captions[this.place.caption];
  }

  /** (T x L) as bytes, decoded once. */
  get levels() {
    return (this.caption.decoded ??= bytes(this.caption.levels));
  }

  /** Alphas of one word, (L). */
  alphas(word) {
    const peak = this.caption.peaks[word] / 255;
    const levels = this.levels.subarray(word * this.locations, (word + 1) * this.locations);
    return Float32Array.from(levels, (level) => level * peak);
  }

  #fillBeam() {
    const alone = this.look.captions.length === 1;
    this.beam.hidden = alone;
    this.beam.previousSibling.hidden = alone;
    this.beam.replaceChildren(
      ...this.look.captions.map((caption, rank) =>
        element(
          "li",
          {},
          button(
            { class: "told", "data-rank": rank, onclick: () => this.showCaption(rank) },
            element("span", {}, caption.words.join(" ") || "(no words)"),
            element("span", { class: "score" }, caption.score === null ? "" : short(caption.score)),
          ),
        ),
      ),
    );
  }

  /** Show another caption of the beam, from its first word unless told where it was left. */
  showCaption(rank, { word = 0, pinned = null, lead = true } = {}) {
    Object.assign(this.place, { caption: rank, word, pinned });
    const { words, betas } = this.caption;
    this.beam.querySelectorAll(".told").forEach((told, k) => told.setAttribute("aria-pressed", String(k === rank)));
    this.words.replaceChildren(
      ...words.map((text, step) =>
        button(
          { class: "word", "data-step": step, tabindex: "-1" },
          element("span", { class: "text" }, text),
          betas === null
            ? null
            : element("span", { class: "gate", title: `β ${short(betas[step])}` }, element("span", { style: `width:${100 * (betas[step] ?? 0)}%` })),
        ),
      ),
    );
    this.labels.replaceChildren(...words.map((text) => element("span", {}, text)));
    const alignment = this.root.querySelector(".alignment");
    alignment.style.setProperty("--words", words.length);
    alignment.style.setProperty("--rows", this.look.rows);
    this.#drawMatrix();
    this.show(Math.min(word, words.length - 1), { lead });
  }

  /** Show where one word looked; the other runs follow to their own such word. */
  show(word, { lead = true } = {}) {
    this.place.word = Math.max(0, word);
    this.words.querySelectorAll(".word").forEach((item, step) => {
      const shown = step === this.place.word;
      item.setAttribute("aria-pressed", String(step === this.place.pinned));
      if (shown) item.setAttribute("aria-current", "true");
      else item.removeAttribute("aria-current");
      item.tabIndex = shown ? 0 : -1;
    });
    this.labels.querySelectorAll("span").forEach((label, step) => label.classList.toggle("shown", step === this.place.word));
    this.rowMark.style.setProperty("--row", this.place.word);
    this.rowMark.hidden = this.caption.words.length === 0;
    this.draw();
    this.#describe();
    if (lead) this.explorer.follow(this);
  }

  move(steps) {
    const last = this.caption.words.length - 1;
    this.show(Math.max(0, Math.min(last, this.place.word + steps)));
    if (this.words.contains(document.activeElement)) this.words.children[this.place.word]?.focus();
  }

  /** Hold the word that is shown, or let it go when it is held already. */
  pin() {
    if (this.caption.words.length === 0) return;
    this.place.pinned = this.place.pinned === this.place.word ? null : this.place.word;
    this.show(this.place.word);
  }

  unpin() {
    this.place.pinned = null;
    this.show(this.place.word);
  }

  /** Back to the word that is held, if one is. */
  rest() {
    if (this.place.pinned !== null && this.place.pinned !== this.place.word) this.show(this.place.pinned);
  }

  draw() {
    const { width, height, pixels } = this.image;
    if (!pixels) return; // the picture is still being decoded, and draws when it is there
    const { map, style, opacity } = this.explorer;
    const { rows, columns } = this.look;
    const word = this.caption.words[this.place.word];
    this.canvas.width = width;
    this.canvas.height = height;
    const drawing = this.canvas.getContext("2d", { willReadFrequently: true }); // written pixel by pixel: not the GPU's work
    const chosen = word === undefined ? null : this.caption.chosen[this.place.word];
    if (word === undefined) {
      drawing.putImageData(pixels, 0, 0);
    } else {
      const alpha = this.alphas(this.place.word);
      const spread = style === "cells" ? map.cells(alpha, rows, columns, height, width) : map.smooth(alpha, rows, columns, height, width);
      const dim = chosen === null ? 1 : map.constants.dimChosen;
      const strength = map.strengths(spread, this.locations).map((value) => dim * value);
      drawing.putImageData(new ImageData(map.lit(pixels.data, strength, opacity), width, height), 0, 0);
    }
    this.#frame(this.chosenFrame, chosen);
    this.canvas.setAttribute(
      "aria-label",
      word === undefined ? this.image.name : `${this.image.name}: where ${this.look.run} looked at “${word}”`,
    );
  }

  #frame(frame, location) {
    frame.hidden = location === null;
    if (location === null) return;
    const { rows, columns } = this.look;
    frame.style.left = `${(100 * (location % columns)) / columns}%`;
    frame.style.top = `${(100 * Math.floor(location / columns)) / rows}%`;
    frame.style.width = `${100 / columns}%`;
    frame.style.height = `${100 / rows}%`;
    frame.dataset.location = location;
  }

  #drawMatrix() {
    const steps = this.caption.words.length;
    this.matrix.width = this.locations;
    this.matrix.height = Math.max(1, steps);
    this.matrix.setAttribute(
      "aria-label",
      `Alignment of ${steps} words with ${this.locations} locations, row by row of the image. Arrow keys move through it.`,
    );
    const drawing = this.matrix.getContext("2d");
    for (let step = 0; step < steps; step++) {
      const strength = this.explorer.map.strengths(this.alphas(step), this.locations);
      const chosen = this.caption.chosen[step];
      const colored = this.explorer.map.colored(chosen === null ? strength : strength.map((s) => s * this.explorer.map.constants.dimChosen));
      if (chosen !== null) colored.fill(255, 4 * chosen, 4 * chosen + 4);
      drawing.putImageData(new ImageData(colored, this.locations, 1), 0, step);
    }
  }

  /** Mark a location in picture and matrix, and shade the words by how much they looked there; null ends that. */
  mark(location) {
    this.#frame(this.hereFrame, location);
    this.columnMark.hidden = location === null;
    if (location !== null) {
      this.columnMark.style.left = `${(100 * location) / this.locations}%`;
      this.columnMark.style.width = `${100 / this.locations}%`;
    }
    this.words.classList.toggle("by-location", location !== null);
    this.words.querySelectorAll(".word").forEach((item, step) => {
      const share = location === null ? 0 : this.levels[step * this.locations + location] / 255;
      item.style.setProperty("--here", share.toFixed(3));
    });
    this.#describe(location);
  }

  #describe(location = null) {
    const { words, betas, logProbs, chosen } = this.caption;
    const step = this.place.word;
    if (words.length === 0) {
      this.details.textContent = "This caption has no words.";
      return;
    }
    const { columns } = this.look;
    const where = (cell) => `row ${Math.floor(cell / columns) + 1}, column ${(cell % columns) + 1}`;
    const alpha = this.alphas(step);
    const total = alpha.reduce((sum, value) => sum + value, 0) || 1;
    const entropy = alpha.reduce((sum, value) => (value > 0 ? sum - (value / total) * Math.log(value / total) : sum), 0);
    const strongest = alpha.indexOf(alpha.reduce((most, value) => Math.max(most, value), 0));
    const parts = [`“${words[step]}”, word ${step + 1} of ${words.length}`];
    if (this.place.pinned === step) parts.push("pinned");
    if (logProbs !== null && logProbs[step] !== null) parts.push(`probability ${short(Math.exp(logProbs[step]))}`);
    if (betas !== null) parts.push(`β ${short(betas[step])}`);
    if (location !== null) parts.push(`α ${short(alpha[location], 4)} in ${where(location)}`);
    else if (chosen[step] !== null) parts.push(`chose ${where(chosen[step])}, α ${short(alpha[chosen[step]], 3)}`);
    else parts.push(`strongest in ${where(strongest)}`);
    parts.push(`spread over ${Math.round(Math.exp(entropy))} of ${this.locations} cells`);
    this.details.textContent = parts.join(" · ");
    if (this.explorer.active === this) this.explorer.say(`${this.look.run}: ${this.details.textContent}`);
  }

  #overWord(event) {
    const word = event.target.closest(".word");
    if (word) this.show(Number(word.dataset.step));
  }

  #clickWord(event) {
    const word = event.target.closest(".word");
    if (!word) return;
    this.show(Number(word.dataset.step));
    this.pin();
  }

  #pointAtPicture(event) {
    const box = this.stage.getBoundingClientRect();
    const { rows, columns } = this.look;
    const row = along(event.clientY, box.top, box.height, rows);
    const column = along(event.clientX, box.left, box.width, columns);
    this.explorer.locate(this, row * columns + column);
  }

  #pointAtMatrix(event) {
    if (this.caption.words.length === 0) return;
    const box = this.matrix.getBoundingClientRect();
    this.show(along(event.clientY, box.top, box.height, this.caption.words.length));
    this.explorer.locate(this, along(event.clientX, box.left, box.width, this.locations));
  }

  #leaveLocation(event) {
    if (event.pointerType !== "touch") this.explorer.locate(this, null); // a finger that lifts has not lost interest
  }

  #leaveMatrix(event) {
    this.#leaveLocation(event);
    this.rest();
  }

  #matrixKey(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key === "Enter") this.pin();
    else if (event.key in moves && !event.altKey && !event.ctrlKey && !event.metaKey) {
      const [words, locations] = moves[event.key];
      this.move(words);
      const location = (this.explorer.location ?? 0) + locations;
      this.explorer.locate(this, Math.max(0, Math.min(this.locations - 1, location)));
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

class Explorer {
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.map = new AttentionMap(data.map);
    this.style = "smooth";
    this.opacity = 0.9;
    this.run = data.runs.length > 1 && matchMedia(WIDE).matches ? null : 0; // null: all, side by side
    this.current = -1;
    this.active = null;
    this.panels = [];
    this.location = null;
    this.player = null;
    this.places = new WeakMap();
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

  /** Where a look was left: its caption, word and pin survive while another image or run is shown. */
  placeOf(look) {
    if (!this.places.has(look)) this.places.set(look, { caption: 0, word: 0, pinned: null });
    return this.places.get(look);
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
        { role: "option", class: "item", tabindex: "-1", title: image.name, "data-index": index, onclick: () => this.open(index) },
        element("img", { src: image.view, alt: "", decoding: "async", width: image.width, height: image.height }),
        element("span", {}, image.looks[0]?.captions[0].words.join(" ") || image.name),
      ),
    );
    this.list = element(
      "ul",
      { class: "list", role: "listbox", "aria-label": "Images", onkeydown: (event) => this.#listKey(event) },
      ...this.items,
    );
    this.position = element("span", { class: "position" });
    this.name = element("h2", {});
    const previous = button({ class: "previous", "aria-label": "Previous image", title: "Previous image (P)", onclick: () => this.step(-1) }, "‹");
    const next = button({ class: "next", "aria-label": "Next image", title: "Next image (N)", onclick: () => this.step(1) }, "›");
    this.runButtons = [null, ...runs.keys()].map((run) =>
      button(
        { class: "run", "data-run": run ?? "all", title: run === null ? "All runs side by side (0)" : `${runs[run]} (${run + 1})`, onclick: () => this.showRun(run) },
        run === null ? "All runs" : runs[run],
      ),
    );
    this.styleButtons = ["smooth", "cells"].map((style) =>
      button({ class: "style", "data-style": style, title: "Smooth map or cells (S)", onclick: () => this.setStyle(style) }, style === "smooth" ? "Smooth" : "Cells"),
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
    this.playButton = button({ class: "play", "aria-pressed": "false", title: "Play through the words (space)", onclick: () => this.play() });
    this.panelBox = element("div", { class: "panels" });
    this.references = element("ul", {});
    this.referenceBox = element("details", { class: "references", open: true }, element("summary", {}, "References"), this.references);
    this.status = element("p", { class: "status", role: "status", "aria-live": "polite" });
    const several = runs.length > 1;
    const keys = [
      ["← →", "words"],
      ["Enter", "pin a word"],
      ["Esc", "let it go"],
      ...(several ? [[`1 … ${Math.min(9, runs.length)}`, "one run"], ["0", "all runs"]] : []),
      ["B", "next caption of the beam"],
      ["P N", "images"],
      ["S", "smooth or cells"],
      ["Space", "play"],
      ["/", "search"],
    ];
    this.root.append(
      element("aside", {}, element("div", { class: "search" }, this.search, this.count), this.list),
      element(
        "div",
        { class: "main" },
        element("div", { class: "heading" }, element("div", { class: "turn" }, previous, this.position, next), this.name),
        element(
          "div",
          { class: "controls" },
          several ? element("div", { class: "group runs", role: "group", "aria-label": "Runs" }, ...this.runButtons) : null,
          element("div", { class: "group", role: "group", "aria-label": "Map" }, ...this.styleButtons),
          element("label", { class: "opacity" }, "Map ", this.slider),
          this.playButton,
        ),
        this.panelBox,
        this.referenceBox,
        element("p", { class: "note" }, "The bar under a word is β: how far the gate let in what was seen."),
        element("p", { class: "keys" }, ...keys.map(([key, what]) => element("span", {}, element("kbd", {}, key), ` ${what}`))),
        this.status,
      ),
    );
    this.setStyle(this.style);
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
    this.#reveal(this.items[index]);
    this.#count();
    this.references.replaceChildren(...image.references.map((text) => element("li", {}, text)));
    this.referenceBox.hidden = image.references.length === 0;
    this.#showPanels();
    if (image.pixels) return;
    image.pixels = await this.#pixels(image);
    this.panels.forEach((panel) => panel.draw());
  }

  /** Scroll the list alone: scrollIntoView would move the page too. */
  #reveal(item) {
    const { list } = this;
    const [box, outer] = [item.getBoundingClientRect(), list.getBoundingClientRect()];
    list.scrollTop += Math.min(0, box.top - outer.top) + Math.max(0, box.bottom - outer.bottom);
    list.scrollLeft += Math.min(0, box.left - outer.left) + Math.max(0, box.right - outer.right);
  }

  async #pixels(image) {
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
    const wanted = image.looks.filter((look) => this.run === null || look.run === this.data.runs[this.run]);
    this.panels = wanted.map((look) => new Panel(this, image, look));
    this.panelBox.replaceChildren(...this.panels.map((panel) => panel.root));
    if (!wanted.length) this.panelBox.append(element("p", {}, `${this.data.runs[this.run]} has no caption of this image.`));
    this.panelBox.style.setProperty("--panels", Math.max(1, this.panels.length));
    this.runButtons.forEach((item, k) => item.setAttribute("aria-pressed", String(this.run === (k ? k - 1 : null))));
    this.active = null;
    if (this.panels.length) this.activate(this.panels[0]);
  }

  /** Show one run, or all of them side by side (null); what is shown goes on at the word shown before. */
  showRun(run) {
    if (run === this.run || run >= this.data.runs.length) return;
    const before = this.active;
    this.play(false);
    this.run = run;
    if (this.current < 0) return;
    this.#showPanels();
    const same = this.panels.find((panel) => panel.look === before?.look);
    if (same) this.activate(same);
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
    const word = words[panel.place.word];
    const occurrence = words.slice(0, panel.place.word).filter((other) => other === word).length;
    for (const other of this.panels) {
      if (other.look === panel.look) continue;
      const found = [...other.caption.words.keys()].filter((step) => other.caption.words[step] === word);
      const step = found[Math.min(occurrence, found.length - 1)];
      if (step !== undefined) other.show(step, { lead: false });
    }
  }

  /** Mark a location in every panel with the same grid; null ends that. */
  locate(panel, location) {
    this.location = location;
    for (const other of this.panels) {
      const same = other.look.rows === panel.look.rows && other.look.columns === panel.look.columns;
      other.mark(same ? location : null);
    }
  }

  setStyle(style) {
    this.style = style;
    this.styleButtons.forEach((item) => item.setAttribute("aria-pressed", String(item.dataset.style === style)));
    this.panels.forEach((panel) => panel.draw());
  }

  /** Go through the words of the active panel, from the first one when the last is shown. */
  play(on = this.player === null) {
    clearInterval(this.player);
    this.player = null;
    if (on && this.active?.caption.words.length) {
      const step = () => {
        const { place, caption } = this.active;
        if (place.word >= caption.words.length - 1) this.play(false);
        else this.active.move(1);
      };
      if (this.active.place.word >= this.active.caption.words.length - 1) this.active.show(0);
      this.player = setInterval(step, PLAY_INTERVAL);
    }
    this.playButton.setAttribute("aria-pressed", String(this.player !== null));
    const [sign, text] = this.player === null ? ["▶", "Play"] : ["■", "Stop"];
    this.playButton.setAttribute("aria-label", text);
    this.playButton.replaceChildren(sign, element("span", {}, ` ${text}`));
  }

  say(text) {
    this.status.textContent = text;
  }

  /** Keep the images all of whose words occur in their names, captions or references. */
  filter(text) {
    const wanted = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.matching = this.data.images.flatMap((image, index) => {
      image.text ??= [
        image.name,
        ...image.references,
        ...image.looks.flatMap((look) => look.captions.map((caption) => caption.words.join(" "))),
      ].join("\n").toLowerCase();
      const matches = wanted.every((word) => image.text.includes(word));
      this.items[index].hidden = !matches;
      return matches ? [index] : [];
    });
    this.#count();
    if (this.matching.length && this.current >= 0 && !this.matching.includes(this.current)) this.open(this.matching[0]);
  }

  #count() {
    const { images } = this.data;
    const all = this.matching.length === images.length;
    this.count.textContent = all ? `${images.length} image${images.length === 1 ? "" : "s"}` : `${this.matching.length} of ${images.length}`;
    const place = this.matching.indexOf(this.current);
    this.position.textContent = `${place < 0 ? "–" : place + 1} / ${this.matching.length}`;
  }

  /** The next or previous image of those that match the search. */
  step(direction) {
    const ahead = this.matching.filter((index) => (direction > 0 ? index > this.current : index < this.current));
    if (ahead.length) this.open(direction > 0 ? ahead[0] : ahead[ahead.length - 1]);
  }

  #listKey(event) {
    const directions = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };
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
      if (this.matching.length) this.items[this.current].focus({ preventScroll: true });
    }
  }

  #key(event) {
    const { target, key } = event;
    if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented) return;
    if (target !== document.body && !this.root.contains(target)) return;
    if (target.matches("input, select, textarea")) return;
    const onButton = target.matches("button, summary, a");
    const done = this.#act(key, onButton);
    if (done) event.preventDefault();
  }

  /** Do what a key stands for; returns whether it stands for anything. */
  #act(key, onButton) {
    const panel = this.active;
    if (/^[0-9]$/.test(key)) this.showRun(key === "0" ? (this.data.runs.length > 1 ? null : this.run) : Number(key) - 1);
    else if (key === "/") this.search.focus();
    else if (key === "n" || key === "N") this.step(1);
    else if (key === "p" || key === "P") this.step(-1);
    else if (key === "s" || key === "S") this.setStyle(this.style === "smooth" ? "cells" : "smooth");
    else if (key === " " && !onButton) this.play();
    else if (!panel) return false;
    else if (key === "ArrowRight") panel.move(1);
    else if (key === "ArrowLeft") panel.move(-1);
    else if (key === "Home") panel.move(-Infinity);
    else if (key === "End") panel.move(Infinity);
    else if (key === "Enter" && !onButton) panel.pin();
    else if (key === "Escape") panel.unpin();
    else if (key === "b" || key === "B") panel.showCaption((panel.place.caption + 1) % panel.look.captions.length);
    else return false;
    return true;
  }
}

const root = document.currentScript.closest(".explorer");
root.explorer = new Explorer(root, JSON.parse(root.querySelector(".explorer-data").textContent));
