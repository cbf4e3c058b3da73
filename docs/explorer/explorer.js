// explorer.js - the page: forms of two designs, what comes of them, and their timelines.
"use strict"

const Explorer = (async () => {
  const { element, digits, timeText } = Timelines
  const facts = JSON.parse(document.getElementById("facts").textContent)
  const byId = (id) => document.getElementById(id)
  const wasm = Uint8Array.from(atob(byId("wasm").textContent), (c) => c.charCodeAt(0))
  const laboratory = await Laboratory.open(wasm, facts)

  // -- designs, as data ---------------------------------------------------------------------------------------------

  const PLAIN = {
    family: "seq1f1b", P: 4, M: 4, k: 2, v: 1, options: {}, order: "",
    F: 1, B: 2, W: null, message: 0, attention: 0, split: "even",
    recompute: "none", offload: "none", tier: 0.5, cap: 1,
  }
  const make = (changes) => ({ ...PLAIN, ...changes })

  const FIRST = [make({ family: "1f1b", k: 1 }), PLAIN] // as in the paper

  // The designs of a link; null where it holds none.
  function fromLink(text) {
    try {
      const [a, b = a] = JSON.parse(decodeURIComponent(text))
      return [make(a), make(b)]
    } catch {
      return null
    }
  }

  // -- the form of a design -----------------------------------------------------------------------------------------

  const familyOf = (design) => facts.families.find(({ name }) => name === design.family)
  const FAMILIES = [...facts.families.map(({ name }) => [name, name]), ["text", "an order as text"]]
  const NO_FIELD = ["costs", "transfer", "unit_bytes", "cap_bytes", "trees"] // options that other fields say, or none
  const WAYS = [["none", "none"], ["all", "all units"], ["fit", "as few as fit"]]
  const SPLITS = [["even", "equal lengths"], ["equal", "equal times"]]

  // The fields that say something of a design: name, label, what it is, and its choices, or how its input looks.
  function fieldsOf(design) {
    const family = familyOf(design)
    const [count, seconds] = [{ min: 1, step: 1 }, { min: 0, step: "any" }]
    const fields = [["family", "family", "the rule by which units are ordered", FAMILIES]]
    if (family) {
      fields.push(
        ["P", "P ranks", "pipeline ranks", count],
        ["M", "M micro-b.", "micro-batches: slices of the batch", count],
        ["k", "k segments", "segments: slices of each micro-batch along the sequence", count],
        ["v", "v stages", "stages that each rank holds", count],
      )
      for (const option of family.options.filter((name) => !NO_FIELD.includes(name))) {
        const words = facts.options.find(({ name }) => name === option).words.map((word) => [word, word])
        const title = `option ${option} of ${family.name}; empty: the family's own`
        const about = words.length ? [["", "its own"], ...words] : { min: 0, step: 1 }
        fields.push([`option.${option}`, option.replace("_", " "), title, about])
      }
    }
    fields.push(
      ["F", "F, s", "seconds that a rank takes for the forward of a micro-batch", seconds],
      ["B", "B, s", "seconds that it takes for the backward", seconds],
      ["W", "of it W, s", "the part of B that a split backward puts off, for weight gradients; empty: half", seconds],
      ["message", "message, s", "seconds of a message between two stages", seconds],
      ["attention", "attention", "share of causal attention in F and B: later segments attend to more tokens",
        { min: 0, max: 1, step: 0.05 }],
      ["split", "split", "how a sequence is cut into segments", SPLITS],
      ["recompute", "recompute", "units that run their forward again before the backward", WAYS],
      ["offload", "move to a tier", "units whose activations go to the host, or a file, and come back", WAYS],
    )
    if (design.offload !== "none")
      fields.push(["tier", "each way, s", "seconds of a rank's tier for what it saves of a micro-batch", seconds])
    if (design.recompute === "fit" || design.offload === "fit")
      fields.push(["cap", "cap, micro-batches", "activations that a rank holds at most, in micro-batches", seconds])
    return fields
  }

  function control(name, value, about) {
    const made = Array.isArray(about)
      ? element("select", {}, ...about.map(([value, textContent]) => element("option", { value, textContent })))
      : element("input", { type: "number", ...about })
    made.dataset.name = name
    made.value = value ?? ""
    return made
  }

  // What else changes with a choice: counts that the family, or the model, can have.
  function following(before, changes, result) {
    const after = { ...before, ...changes }
    const family = familyOf(after)
    if (changes.family === "text") after.order = result.text ?? before.order
    else if (changes.family) {
      after.v = Number(family.validity.match(/v = (\d)\b/)?.[1] ?? Math.max(after.v, family.stages_per_rank))
      if (family.has_segments !== after.k > 1) after.k = family.has_segments ? 4 : 1
      if (family.validity.includes("M = P")) after.M = after.P
    }
    return after
  }

  class Panel {
    constructor(side) {
      this.side = side
      this.form = element("div", { className: "fields", onchange: ({ target }) => this.read(target) })
      this.rule = element("p", { className: "rule" })
      this.refusal = element("div", { ariaLive: "polite" })
      this.area = element("textarea", { spellcheck: false, wrap: "off", ariaLabel: `Order of design ${side} as text` })
      this.area.addEventListener("input", () => {
        const wasText = this.design.family === "text"
        this.set({ ...this.design, family: "text", order: this.area.value }, !wasText)
      })
      const summary = element("summary", { textContent: "The order as text: edit it" })
      const editor = element("details", {}, summary, this.area)
      const title = element("h2", { textContent: `Design ${side}` })
      const parts = [title, this.form, this.rule, this.refusal, editor]
      this.box = element("section", { className: "panel", ariaLabel: `Design ${side}` }, ...parts)
    }

    // A new value of a field.
    read({ dataset: { name }, value, type }) {
      const option = name.startsWith("option.") ? name.slice(7) : null
      const given = type !== "number" ? value : value === "" ? null : Number(value)
      const { [option]: _, ...others } = this.design.options
      if (given === null && !option && name !== "W") return
      const design = option
        ? { ...this.design, options: given ? { ...others, [option]: given } : others }
        : following(this.design, { [name]: given }, this.result)
      this.set(design, type === "select-one")
    }

    set(design, changesForm) {
      this.design = design
      if (changesForm) this.fill()
      update([this], true)
    }

    // Writes the form anew.
    fill() {
      const { design } = this
      const focused = this.form.contains(document.activeElement) ? document.activeElement.dataset.name : null
      const fields = fieldsOf(design).map(([name, label, title, about]) => {
        const value = name.startsWith("option.") ? design.options[name.slice(7)] : design[name]
        const made = control(name, value, about)
        return element("label", { title, className: made.type === "number" ? "" : "wide" }, label, made)
      })
      this.form.replaceChildren(...fields)
      this.form.querySelector(`[data-name="${focused}"]`)?.focus()
      const { description, source, validity } = familyOf(design) ?? {}
      this.rule.textContent = description
        ? `${description}. ${source}. Needs ${validity}.`
        : "Units of a rank stand on one line, in the order in which it runs them."
    }

    compute() {
      this.result = laboratory.compute(this.design)
      const { refused, text } = this.result
      const order = this.design.family === "text" ? this.design.order : (text ?? "")
      if (this.area.value !== order) this.area.value = order
      this.refusal.replaceChildren(...(refused === null ? [] : [element("div", { className: "refused" }, refused)]))
    }

    timeline() {
      const { result, design } = this
      const name = design.family === "text" ? "order as text" : design.family
      const heading = `${this.side}: ${name}${result.k > 1 ? `, ${result.k} segments` : ""}`
      return { ...result, heading, note: limitText(result) }
    }
  }

  // -- results ------------------------------------------------------------------------------------------------------

  // A sentence on what limits the step: the work of the rank that works most, and its waits.
  function limitText({ P, busy, span, makespan, path, start, end }) {
    const isLevel = (more) => Math.abs(more) <= 1e-9 * makespan // of equal ones, the one without gaps
    const first = (a, b) => (isLevel(busy[b] - busy[a]) ? span[b] - busy[b] < span[a] - busy[a] : busy[b] > busy[a])
    const rank = Array.from({ length: P }, (_, r) => r).reduce((a, b) => (first(a, b) ? b : a))
    const part = (x) => `${timeText(x)} (${Math.round((100 * x) / makespan)}%)`
    const fills = "before its first unit and after its last: more micro-batches or segments make this share smaller"
    const waits = [[makespan - span[rank], fills], [span[rank] - busy[rank], "between its units"]]
      .filter(([seconds]) => seconds > 0.005 * makespan)
      .sort(([a], [b]) => b - a)
      .map(([seconds, text]) => `${part(seconds)} ${text}`)
    const works = `Limited by rank ${rank}, which works ${timeText(busy[rank])} of ${timeText(makespan)}`
    const said = [waits.length ? `${works}. It waits ${waits.join("; and ")}.` : `${works}.`]
    const messages = makespan - (path ?? []).reduce((sum, i) => sum + end[i] - start[i], 0)
    if (path && messages > 0.005 * makespan) said.push(`Messages take ${part(messages)} of the critical path.`)
    if (!path) said.push("Slack and critical path are not known where units move to a tier.")
    return said.join(" ")
  }

  function showTable(results) {
    const held = ({ memory }) => Math.max(...memory.total) / memory.whole
    const rows = [
      ["step", (r) => r.makespan, (r) => timeText(r.makespan)],
      ["bubble", (r) => r.bubble, (r) => `${(100 * r.bubble).toFixed(1)}%`],
      ["most that a rank holds", held, (r) => `${digits(held(r), 3)} micro-batches`],
    ].map(([label, value, text]) => {
      const [a, b] = results.map(value)
      const ratio = b !== undefined && a > 0 ? (b / a).toFixed(2) : ""
      const cells = [...results.map(text), ratio].map((textContent) => element("td", { textContent }))
      return element("tr", {}, element("th", { scope: "row", textContent: label }), ...cells)
    })
    const heads = ["", ...shown().map(({ side }) => side), results.length === 2 ? "B / A" : ""]
    const head = element("tr", {}, ...heads.map((textContent) => element("th", { scope: "col", textContent })))
    byId("compared").replaceChildren(head, ...(results.length ? rows : []))
  }

  // -- the page -----------------------------------------------------------------------------------------------------

  const timelines = new Timelines(byId("timelines"), facts.style, { wheelZooms: false })
  const panels = ["A", "B"].map((side) => new Panel(side))
  const shown = () => panels.filter(({ result }) => result.refused === null)

  // Computes what has changed and shows all; `keepsView`: as far as it was zoomed in.
  function update(changed, keepsView) {
    history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(panels.map(({ design }) => design)))}`)
    changed.forEach((panel) => panel.compute())
    showTable(shown().map(({ result }) => result))
    timelines.show(shown().map((panel) => panel.timeline()), { keepsView })
  }

  function open(pair) {
    panels.forEach((panel, i) => {
      panel.design = pair[i] ?? pair[0]
      panel.fill()
    })
    update(panels, false)
  }

  byId("panels").append(...panels.map(({ box }) => box))
  addEventListener("hashchange", () => location.reload()) // another link
  open(fromLink(location.hash.slice(1)) ?? FIRST)
  return { panels, timelines, open, make, fromLink, laboratory } // for tests, and for whoever opens the console
})()
