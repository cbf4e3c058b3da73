// explorer.js - the page: forms of two designs, what comes of them, and their timelines.
"use strict"

const Explorer = (() => {
  const facts = JSON.parse(document.getElementById("facts").textContent)
  const byId = (id) => document.getElementById(id)
  const digits = (x, n) => String(+x.toPrecision(n))

  function element(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties)
    made.append(...children)
    return made
  }

  // -- the form of a design -----------------------------------------------------------------------------------------

  const families = facts.families
  const familyOf = (design) => families.find((one) => one.name === design.family)
  const isOrder = (design) => design.family === "text"
  const hasCounts = (design) => !isOrder(design)
  const isPlain = (design) => design.costs === "seconds"
  const takes = (option) => (design) => familyOf(design)?.options.includes(option)
  const hasOwnLengths = (design) => !["even", "equal"].includes(design.split)
  const fits = (design) => design.recompute === "fit" || design.offload === "fit"
  const plain = (values) => [[null, values]]
  const named = (test) => families.filter(test).map((one) => [one.name, one.name])
  // The counts that a model's costs are known for; null: any.
  const ofModel = (name) => (design) =>
    isPlain(design) ? null : plain(facts.presets[design.costs][name].map((count) => [count, count]))
  const WAYS = plain([["none", "none"], ["all", "all units"], ["fit", "as few as fit"]])

  // The fields of a form: numbers, choices, or texts, and for which designs they say anything.
  const FIELDS = {
    family: {
      wide: true, title: "the rule by which units are ordered",
      choices: () => [
        ["over segments", named((one) => one.has_segments)],
        ["over whole micro-batches", named((one) => !one.has_segments)],
        ["yours", [["text", "an order as text"]]],
      ],
    },
    P: {
      label: "P ranks", title: "pipeline ranks", least: 1, step: 1,
      when: (design) => hasCounts(design) && isPlain(design),
    },
    M: { label: "M micro-b.", title: "micro-batches: slices of the batch", least: 1, step: 1, when: hasCounts },
    k: {
      label: "k segments", title: "segments: slices of each micro-batch along the sequence", least: 1, step: 1,
      when: hasCounts, choices: ofModel("k"),
    },
    parents: {
      label: "parents", wide: true, of: "parents", when: (design) => familyOf(design)?.has_segments && isPlain(design),
      title:
        "micro-batches whose segments are trees: what each segment follows, -1,0,0; a word for all micro-batches, or " +
        "one for each, with - for a chain; empty: chains",
    },
    v: {
      label: "v stages", title: "stages that each rank holds", least: 1, step: 1,
      when: hasCounts, choices: ofModel("v"),
    },
    "option.cap": {
      label: "cap, units", title: "(stage, segment) units that a rank holds at most; empty: the family's own", step: 1,
      when: takes("cap"),
    },
    "option.group": {
      label: "group", title: "micro-batches that go forward, and back, together; empty: 2", step: 1,
      when: takes("group"),
    },
    "option.round": {
      label: "round", title: "a round holds at least so many micro-batches; empty: the family's own", step: 1,
      when: takes("round"),
    },
    "option.rounds": {
      label: "rounds", title: "what a round of the interleaving holds", when: takes("rounds"),
      choices: () => plain([["", "its own"], ["microbatches", "micro-batches"], ["segments", "segments"]]),
    },
    "option.extra_warmup": {
      label: "extra warm-up", title: "more forwards before the first backward, for each stage behind the rank's own",
      step: 1, when: takes("extra_warmup"),
    },
    "option.placement": {
      label: "placement", title: "where stages lie", when: takes("placement"),
      choices: () => plain([["", "the better"], ["loop", "loop"], ["v", "V"]]),
    },
    "option.trees": {
      label: "trees", title: "whether branches go forward by their numbers, or one after another", when: takes("trees"),
      choices: () => plain([["", "by number"], ["nested", "nested"]]),
    },
    "option.backward": {
      label: "backward", title: "one B, or I and W", when: takes("backward"),
      choices: () => plain([["", "split"], ["whole", "whole"]]),
    },
    costs: {
      wide: true, title: "seconds and bytes of units",
      choices: () => [
        [null, [["seconds", "seconds"]]],
        ["a model's on H100, on paper", Object.entries(facts.presets).map(([name, { title }]) => [name, title])],
      ],
    },
    F: { label: "F, s", title: "seconds that a rank takes for the forward of a micro-batch", when: isPlain },
    B: { label: "B, s", title: "seconds that it takes for the backward", when: isPlain },
    W: {
      label: "of it W, s", title: "the part of B that a split backward puts off, for weight gradients; empty: half",
      placeholder: "half", when: isPlain,
    },
    message: { label: "message, s", title: "seconds of a message between two stages", when: isPlain },
    attention: {
      label: "attention", title: "share of causal attention in F and B: later segments attend to more tokens",
      most: 1, step: 0.05, when: isPlain,
    },
    split: {
      label: "split of the sequence", title: "how a sequence is cut into segments",
      choices: (design) => {
        const own = [[hasOwnLengths(design) ? design.split : "own", "lengths:"]]
        return plain([["even", "equal lengths"], ["equal", "equal times"], ...(isPlain(design) ? own : [])])
      },
    },
    lengths: {
      label: "tokens of each segment", title: "numbers with blanks or commas between them", wide: true, of: "split",
      when: (design) => isPlain(design) && hasOwnLengths(design),
    },
    recompute: { title: "units that run their forward again before the backward", choices: () => WAYS },
    offload: {
      label: "move to a tier", title: "units whose activations go to the host, or a file, and come back",
      choices: () => WAYS,
    },
    tier: {
      label: "each way, s", title: "seconds that a rank's tier takes for what the rank saves of a micro-batch",
      when: (design) => isPlain(design) && design.offload !== "none",
    },
    cap: {
      label: (design) => (isPlain(design) ? "cap, micro-batches" : "cap, GiB"),
      title: "what a rank holds at most: activations in micro-batches, or all bytes, with weights and optimizer",
      when: fits,
    },
    weights: {
      label: "weight gradients", title: "whether backwards are split, and W also runs while a rank waits for a message",
      choices: () => plain([["planned", "in their place"], ["fill", "fill waits"]]),
    },
  }

  class Panel {
    constructor(side, changed) {
      Object.assign(this, { side, changed, bench: new Bench(), result: null })
      this.title = element("h2", {}, `Design ${side}`, element("small"))
      this.form = element("div", { className: "fields" })
      this.rule = element("p", { className: "rule" })
      this.said = element("div")
      this.said.setAttribute("aria-live", "polite")
      this.editor = this.makeEditor()
      this.exports = this.makeExports()
      const parts = [this.title, this.form, this.rule, this.said, this.editor, this.exports]
      this.box = element("section", { className: "panel" }, ...parts)
      this.box.setAttribute("aria-label", `Design ${side}`)
    }

    set(changes, rebuilds = false) {
      this.design = { ...this.design, ...changes }
      if (rebuilds) this.fill()
      this.changed(this)
    }

    show(design) {
      this.design = design
      this.fill()
    }

    // Writes the form anew.
    fill() {
      const { design } = this
      const focused = this.form.contains(document.activeElement) ? document.activeElement.dataset.name : null
      const shown = Object.entries(FIELDS).filter(([, { when }]) => when === undefined || when(design))
      this.form.replaceChildren(...shown.map(([name, field]) => this.field(name, field)))
      const family = familyOf(design)
      this.rule.textContent = family
        ? `${family.description}. ${family.source}. Needs ${family.validity}.`
        : "Units of a rank stand on one line, in the order in which it runs them."
      if (!isPlain(design)) this.rule.textContent = `${facts.presets[design.costs].about}. ${this.rule.textContent}`
      if (focused) this.form.querySelector(`[data-name="${focused}"]`)?.focus()
    }

    field(name, { label = name, title, wide = false, choices, ...about }) {
      const option = name.startsWith("option.") ? name.slice(7) : null
      const given = option ? this.design.options[option] : this.design[about.of ?? name]
      const groups = choices?.(this.design) ?? null
      const control = groups ? this.choice(groups) : this.input(about)
      control.dataset.name = name
      control.value = given ?? ""
      control.addEventListener(groups ? "change" : "input", () => {
        const isNumber = about.least !== undefined || (!groups && !about.of)
        const value = isNumber ? (control.value === "" ? null : Number(control.value)) : control.value
        if (option) this.set({ options: this.withOption(option, value) }, groups !== null)
        else if (groups) this.set(this.following({ [name]: value }), true)
        else if (value !== null || name === "W") this.set({ [about.of ?? name]: value })
      })
      const text = typeof label === "function" ? label(this.design) : label
      return element("label", { className: wide ? "wide" : "", title }, text, control)
    }

    input({ of, least = 0, most, step = "any", placeholder = "" }) {
      if (of) return element("input", { size: 18 })
      return element("input", { type: "number", min: least, max: most ?? "", step, placeholder })
    }

    choice(groups) {
      const control = element("select")
      for (const [label, values] of groups) {
        const options = values.map(([value, text]) => element("option", { value, textContent: text }))
        control.append(...(label === null ? options : [element("optgroup", { label }, ...options)]))
      }
      return control
    }

    withOption(option, value) {
      const { [option]: _, ...others } = this.design.options
      return value === null || value === "" ? others : { ...others, [option]: value }
    }

    // What else changes with a choice: counts that the family, or the model, can have.
    following(changes) {
      const after = { ...this.design, ...changes }
      const family = familyOf(after)
      if (changes.family === "text") changes.order = this.result?.text ?? this.design.order
      else if (changes.family && family) {
        if (after.v < family.stages_per_rank) changes.v = family.stages_per_rank
        const only = family.validity.match(/v = (\d)\b/)
        if (only) changes.v = Number(only[1])
        if (!family.has_segments && after.k > 1) changes.k = 1
        if (family.has_segments && after.k === 1) changes.k = 4
        if (family.validity.includes("M = P")) changes.M = after.P
      }
      if (changes.split === "own") {
        const k = this.result?.k ?? after.k
        changes.split = Array.from({ length: k }, (_, s) => 1024 + 256 * (k - 1 - s)).join(" ")
      }
      if (changes.costs && changes.costs !== "seconds") {
        const preset = facts.presets[changes.costs]
        changes.P = preset.P
        if (!preset.k.includes(after.k)) changes.k = 8
        if (hasOwnLengths(after)) changes.split = "equal"
      }
      const isInBytes = !isPlain({ ...after, ...changes })
      if (fits(after) && (changes.costs || !fits(this.design)))
        changes.cap = isInBytes ? facts.presets[after.costs].memory / 2 ** 30 : 1
      return changes
    }

    makeExports() {
      const button = (text, title, act) => element("button", { type: "button", textContent: text, title, onclick: act })
      const saveSvg = () => save(`${this.fileName()}.svg`, timelines.svg(this.index()), "image/svg+xml")
      return element(
        "div", { className: "exports" },
        button("Order", "Save the order as text", () => save(`${this.fileName()}.txt`, this.result.text)),
        button("Torch CSV", "Save the order as torch's action CSV", () => this.saveCsv()),
        button("PNG", "Save the timeline as it stands, on white", () => this.savePng()),
        button("SVG", "Save the timeline as it stands, on white", saveSvg),
        button("Python", "The lines that build and simulate this design", () =>
          showPython(Designs.toPython(this.computed, this.result, facts)),
        ),
      )
    }

    // -- the order as text ------------------------------------------------------------------------------------------

    makeEditor() {
      this.ink = element("pre")
      this.ink.setAttribute("aria-hidden", "true")
      this.area = element("textarea", { spellcheck: false, wrap: "off" })
      this.area.setAttribute("aria-label", `Order of design ${this.side} as text`)
      this.area.addEventListener("input", () => {
        const wasText = this.design.family === "text"
        this.paint([])
        this.set({ family: "text", order: this.area.value }, !wasText)
      })
      this.area.addEventListener("scroll", () => this.follow())
      const summary = element("summary", { textContent: "The order as text: edit it" })
      const editor = element("div", { className: "editor" }, this.ink, this.area)
      return element("details", { ontoggle: () => this.write() }, summary, editor)
    }

    // The order, where it is seen: a text of 100,000 units takes its time.
    write() {
      if (this.editor.open && this.area.value !== this.order) this.area.value = this.order
    }

    follow() {
      this.ink.scrollTop = this.area.scrollTop
      this.ink.scrollLeft = this.area.scrollLeft
    }

    paint(marks) {
      const text = this.area.value
      const parts = []
      let at = 0
      for (const { begin, end } of [...marks].sort((a, b) => a.begin - b.begin)) {
        parts.push(text.slice(at, begin), element("mark", { textContent: text.slice(begin, end) }))
        at = end
      }
      this.ink.replaceChildren(...parts, `${text.slice(at)}\n`)
      this.follow()
    }

    // -- results ----------------------------------------------------------------------------------------------------

    // What has been found of a design; the form may hold a newer one.
    take(result, design) {
      Object.assign(this, { result, computed: design })
      this.order = isOrder(this.design) ? this.design.order : (result.text ?? "")
      const { refused } = result
      const marks = refused === null ? [] : Designs.marks(refused.text, this.order)
      if (marks.length) this.editor.open = true
      this.write()
      this.paint(marks)
      this.title.lastChild.textContent = isOrder(this.design) ? "an order as text" : ""
      this.exports.hidden = refused !== null
      this.said.replaceChildren()
      if (refused === null) return
      const about = element("b", { textContent: refused.where === "order" ? "The order breaks a rule. " : "" })
      const box = element("div", { className: "refused" }, about, refused.text)
      for (const rank of new Set(marks.map((mark) => mark.rank))) {
        const row = marks.filter((mark) => mark.rank === rank).sort((a, b) => a.begin - b.begin)
        const isNear = row.length > 1 && row[row.length - 1].end - row[0].begin < 160
        const pieces = isNear ? [row] : row.map((mark) => [mark])
        box.append(...pieces.map((piece) => shownAround(this.order, piece)))
      }
      this.said.replaceChildren(box)
    }

    index() {
      return panels.filter((panel) => panel.shown).indexOf(this)
    }

    fileName() {
      const { family, P, M, k } = { ...this.computed, ...this.result }
      return `${family}-P${P}-M${M}-k${k}`
    }

    saveCsv() {
      const csv = Designs.toCsv(this.result, facts.style.passes)
      const lacks = this.result.parents ? "parents" : "cell for a unit that is recomputed or moved"
      if (csv === null) alert(`Torch's CSV has no ${lacks}: save the order as text.`)
      else save(`${this.fileName()}.csv`, csv, "text/csv")
    }

    savePng() {
      timelines.canvas(this.index()).toBlob((blob) => save(`${this.fileName()}.png`, blob))
    }

    timeline() {
      const { result, computed: design } = this
      const name = design.family === "text" ? "order as text" : design.family
      const { k } = result
      const memory = {
        kind: result.memory.unit === null ? "bytes" : "microbatches", whole: result.memory.unit ?? 1,
        total: result.memory.total, constant: result.memory.constant,
        changes: { ...result.memory.changes, holding: result.memory.changes.holding.map((h) => HOLDING[h]) },
      }
      const heading = `${this.side}: ${name}${k > 1 ? `, ${k} segments` : ""}`
      return { ...result, heading, note: limitText(design, result), bubble: result.limits.bubble, memory }
    }
  }

  // By the core's number of a holding, its number among those that are drawn.
  const HOLDING = facts.holdings.map(({ name }) => facts.style.holdings.findIndex((one) => one.name === name))

  // The line of an order around its marked units.
  function shownAround(order, marks) {
    const [begin, end] = [marks[0].begin, marks[marks.length - 1].end]
    const from = Math.max(order.lastIndexOf("\n", begin) + 1, begin - 40)
    const newline = order.indexOf("\n", end)
    const until = Math.min(newline < 0 ? order.length : newline, end + 40)
    const parts = []
    let at = from
    for (const mark of marks) {
      parts.push(order.slice(at, mark.begin), element("mark", { textContent: order.slice(mark.begin, mark.end) }))
      at = mark.end
    }
    const isCut = (place, edge) => (place > 0 && place < order.length && order[place + edge] !== "\n" ? "…" : "")
    const head = `rank ${marks[0].rank}: ${isCut(from, -1)}`
    return element("div", { className: "marked" }, head, ...parts, order.slice(at, until), isCut(until, 0))
  }

  function secondsText(x) {
    const [second, name] = x >= 1 || x === 0 ? [1, "s"] : x >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"]
    return `${digits(x / second, 3)} ${name}`
  }

  // A sentence on what limits the step: the work of the rank that works most, and its waits.
  function limitText(design, result) {
    const { rank, work, before, behind, between, pathMessages } = result.limits
    const whole = result.makespan
    const part = (x) => `${secondsText(x)} (${Math.round((100 * x) / whole)}%)`
    const works = `works ${secondsText(work)} of ${secondsText(whole)}`
    const ends = before + behind
    const said = []
    const fills = `${part(ends)} before its first unit and after its last, while the pipeline fills and drains`
    const waits = [
      [ends, `${fills}: more micro-batches or segments make this share smaller`],
      [between, `${part(between)} between its units`],
    ].filter(([seconds]) => seconds > 0.005 * whole)
    const causes = waits.sort((a, b) => b[0] - a[0]).map(([, text]) => text)
    if (ends + between < 0.01 * whole) said.push(`Limited by work: rank ${rank} ${works}, and waits for less than 1%.`)
    else said.push(`Limited by rank ${rank}, which ${works}. It waits ${causes.join("; and ")}.`)
    const others = (Array.from(result.busy).reduce((a, b) => a + b, 0) - work) / Math.max(1, result.P - 1)
    if (result.P > 1 && work > 1.03 * others)
      said.push(`The other ranks work ${secondsText(others)} on average: the stages are not balanced.`)
    if (result.path && pathMessages > 0.005 * whole)
      said.push(`Messages take ${part(pathMessages)} of the critical path.`)
    const over = overText(design, result)
    if (over) said.push(over)
    const why = design.weights === "fill" ? "W fills waits" : "units move to a tier"
    if (!result.path) said.push(`Slack and critical path are not known where ${why}.`)
    return said.join(" ")
  }

  // Whether a rank holds more than a GPU of the preset has.
  function overText(design, result) {
    if (isPlain(design)) return null
    const { memory } = facts.presets[design.costs]
    const most = Math.max(...result.memory.total)
    const gib = (bytes) => `${digits(bytes / 2 ** 30, 3)} GiB`
    const rank = result.memory.total.indexOf(most)
    return most > memory ? `Rank ${rank} holds ${gib(most)}, and a GPU has ${gib(memory)}.` : null
  }

  // -- the table ----------------------------------------------------------------------------------------------------

  function peakText(result) {
    const most = Math.max(...result.memory.total)
    if (result.memory.unit === null) return `${digits(most / 2 ** 30, 3)} GiB`
    return `${digits(most / result.memory.unit, 3)} micro-batches`
  }

  function showTable(shown) {
    const rows = [
      ["step", (r) => r.makespan, (r) => secondsText(r.makespan)],
      ["bubble", (r) => r.limits.bubble, (r) => `${(100 * r.limits.bubble).toFixed(1)}%`],
      ["most that a rank holds", (r) => Math.max(...r.memory.total) / (r.memory.unit ?? 1), peakText],
    ]
    const results = shown.map((panel) => panel.result)
    const isOver = shown.map((panel) => overText(panel.computed, panel.result) !== null)
    const alike = results.length === 2 && (results[0].memory.unit === null) === (results[1].memory.unit === null)
    const line = ([label, value, text], n) => {
      const cells = results.map((result) => element("td", { textContent: text(result) }))
      if (results.length === 2 && (n !== 2 || alike)) {
        const [a, b] = results.map(value)
        if (Math.abs(a - b) > 1e-9 * Math.max(a, b)) cells[a < b ? 0 : 1].className = "better"
        cells.push(element("td", { textContent: a > 0 ? `${(b / a).toFixed(2)}` : "" }))
      } else if (results.length === 2) cells.push(element("td"))
      if (n === 2) cells.forEach((cell, i) => cell.classList.toggle("over", isOver[i] === true))
      return element("tr", {}, element("th", { scope: "row", textContent: label }), ...cells)
    }
    const heads = ["", ...shown.map((panel) => panel.side), ...(results.length === 2 ? ["B / A"] : [])]
    const head = heads.map((textContent) => element("th", { scope: "col", textContent }))
    byId("compared").replaceChildren(
      element("thead", {}, element("tr", {}, ...head)),
      element("tbody", {}, ...(results.length ? rows.map(line) : [])),
    )
  }

  // -- the page -----------------------------------------------------------------------------------------------------

  function save(name, content, type = "text/plain") {
    const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }))
    element("a", { href: url, download: name }).click()
    setTimeout(() => URL.revokeObjectURL(url), 10000)
  }

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text)
    } catch { // a page from a file may not have the right
      const area = element("textarea", { value: text })
      document.body.append(area)
      area.select()
      document.execCommand("copy")
      area.remove()
    }
  }

  function showPython(text) {
    const dialog = byId("python")
    dialog.querySelector("pre").textContent = text
    dialog.querySelector(".copy").onclick = () => copy(text)
    dialog.showModal()
  }

  const timelines = new Timelines(byId("timelines"), facts.style, { wheelZooms: false })
  const presets = Designs.presets(facts)
  let pending = 0 // updates that are not done

  function showAll(keepsView) {
    panels.forEach((panel) => (panel.shown = panel.result !== null && panel.result.refused === null))
    const shown = panels.filter((panel) => panel.shown)
    showTable(shown)
    const refusals = panels.filter((panel) => panel.result?.refused)
    const texts = refusals.map(({ side, result }) => `${side}: ${result.refused.text}`)
    byId("refusals").replaceChildren(...texts.map((textContent) => element("p", { className: "refused", textContent })))
    timelines.show(shown.map((panel) => panel.timeline()), { keepsView })
  }

  // Computes what has changed and shows all; `keepsView`: as far as it was zoomed in.
  async function update(changed, keepsView) {
    pending++
    document.body.classList.add("busy")
    history.replaceState(null, "", `#${Designs.toLink(panels.map((panel) => panel.design))}`)
    const taken = await Promise.all(
      changed.map(async (panel) => {
        const { design } = panel
        const result = await panel.bench.compute(design)
        if (result !== null) panel.take(result, design) // else a newer design is on its way
        return result !== null
      }),
    )
    if (taken.includes(true)) showAll(keepsView)
    if (--pending === 0) document.body.classList.remove("busy")
  }

  const panels = ["A", "B"].map((side) => new Panel(side, (panel) => {
    byId("preset").value = ""
    return update([panel], true)
  }))

  function open(pair) {
    panels.forEach((panel, i) => panel.show(pair[i] ?? pair[0]))
    return update(panels, false)
  }

  function begin() {
    byId("panels").append(...panels.map((panel) => panel.box))
    const groups = new Map()
    presets.forEach(({ group, name }, i) => {
      if (!groups.has(group)) groups.set(group, element("optgroup", { label: group }))
      groups.get(group).append(element("option", { value: i, textContent: name }))
    })
    const chosen = byId("preset")
    chosen.append(element("option", { value: "", textContent: "the designs below" }), ...groups.values())
    chosen.addEventListener("change", () => chosen.value && open(structuredClone(presets[chosen.value].pair)))
    byId("link").addEventListener("click", async () => {
      await copy(location.href)
      byId("copied").textContent = "copied: the link holds both designs"
      setTimeout(() => (byId("copied").textContent = ""), 3000)
    })
    addEventListener("hashchange", () => {
      const pair = Designs.fromLink(location.hash.slice(1), facts)
      if (pair === null || Designs.toLink(pair) === Designs.toLink(panels.map((panel) => panel.design))) return
      chosen.value = ""
      open(pair)
    })
    const linked = Designs.fromLink(location.hash.slice(1), facts)
    chosen.value = linked === null ? "0" : ""
    return open(linked ?? structuredClone(presets[0].pair))
  }

  begin()
  return {
    ...Designs, panels, timelines, presets, open, update, Bench, isBusy: () => document.body.classList.contains("busy"),
    fromLink: (text) => Designs.fromLink(text, facts),
    toPython: (design, result) => Designs.toPython(design, result, facts),
    toCsv: (result) => Designs.toCsv(result, facts.style.passes),
  } // for tests, and for whoever opens the console
})()
