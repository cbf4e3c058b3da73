// timeline.js - the timelines of every page, as SVG: ranks x time, units with their names, and the memory of each rank
// below them. Several share one time axis, which a wheel, a drag, two fingers or keys zoom and move.
//
// A timeline is plain data. Units of all ranks lie one rank after another, each rank's in run order:
//   heading, note                    text; a sentence below it, or none
//   makespan, bubble                 seconds; a share of the ranks' time, or null
//   first                            [rank + 1] number of each rank's first unit
//   pass, stage, microbatch, segment [unit]; start, end [unit] seconds
//   slack, path                      [unit] seconds, or null; numbers of units, or null
//   inputs                           {first [unit + 1], units}: whose results each unit takes
//   memory                           {whole, total [rank], constant {name: [rank]}, first, when, by, holding}
//     whole   null: amounts are bytes; else what a micro-batch of activations is
//     first   [rank + 1] number of each rank's first change: when, by how much, and of which of the style's holdings
"use strict"

const Timelines = (() => {
  const [UNITS_TOP, UNITS_BOTTOM, PATH, MEMORY_TOP, MEMORY_BOTTOM] = [0.05, 0.56, 0.605, 0.65, 0.98] // of a rank's row
  const [LEFT, RIGHT, AXIS] = [92, 10, 34] // pixels beside the time axis, and below the last rank
  const LETTER = 6 // pixels of a letter of a unit's name
  const FINGER = 10 // pixels that a tap may be off
  const MOST_OF_PATH = 500 // units of a critical path in view: more would hide the others
  const [INK, FAINT, GRID] = ["var(--ink)", "var(--faint)", "var(--grid)"]
  const LATER =
    '<pattern id="later" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">' +
    '<rect width="2" height="7" fill="#fff" fill-opacity="0.5"/></pattern>'

  // -- numbers and parts of pictures, as text -----------------------------------------------------------------------

  const digits = (x, n) => String(+x.toPrecision(n))
  const unitOfTime = (seconds) => (seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"])

  function timeText(seconds, n = 3) {
    const [second, name] = unitOfTime(seconds || 1)
    return `${digits(seconds / second, n)} ${name}`
  }

  function amountText({ whole }, x, n = 4) {
    if (whole !== null) return `${digits(x / whole, n)} micro-batch${x === whole ? "" : "es"}`
    return x >= 2 ** 30 ? `${digits(x / 2 ** 30, n)} GiB` : `${digits(x / 2 ** 20, n)} MiB`
  }

  const round = (x) => Math.round(100 * x) / 100
  const rect = (x, y, width, height, fill) =>
    `<rect x="${round(x)}" y="${round(y)}" width="${round(width)}" height="${round(height)}" fill="${fill}"/>`
  const label = (x, y, size, fill, anchor, text) =>
    `<text x="${round(x)}" y="${round(y)}" font-size="${size}" fill="${fill}" text-anchor="${anchor}" ` +
    `dominant-baseline="central">${text}</text>`

  function element(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties)
    made.append(...children)
    return made
  }

  // -- one timeline -------------------------------------------------------------------------------------------------

  class Picture {
    constructor(timeline, style) {
      Object.assign(this, { timeline, style, P: timeline.first.length - 1, shortest: Infinity })
      const { first, stage, microbatch, segment, start, end } = timeline
      const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity)
      this.firstStage = Array.from({ length: this.P }, (_, rank) => least(stage.slice(first[rank], first[rank + 1])))
      this.hasLater = stage.some((s, i) => s !== this.firstStage[this.rankOf(i)])
      this.namesStage = this.hasLater || this.firstStage.some((s, rank) => s !== rank)
      this.begin = least(start)
      this.end = end.reduce((a, b) => Math.max(a, b), -Infinity)
      this.critical = new Set(timeline.path ?? [])
      start.forEach((at, i) => end[i] > at && (this.shortest = Math.min(this.shortest, end[i] - at)))
      // As an order's text has them, or shorter where units lack the room for that.
      const forms = [(i) => this.name(i), (i) => `${microbatch[i]}.${segment[i]}`]
      if (!segment.some((s) => s > 0)) forms.push((i) => String(microbatch[i]))
      const longest = (write) => stage.reduce((most, _, i) => Math.max(most, write(i).length), 0)
      this.forms = forms.map((write) => ({ write, longest: longest(write) }))
    }

    rankOf(i) {
      return this.timeline.first.findIndex((begin, rank) => begin <= i && i < this.timeline.first[rank + 1])
    }

    name(i) {
      const { pass, stage, microbatch, segment } = this.timeline
      const { letter } = this.style.passes[pass[i]]
      return `${this.namesStage ? `[${stage[i]}]` : ""}${letter}${microbatch[i]}.${segment[i]}`
    }

    heading() {
      const { heading, makespan, bubble } = this.timeline
      const share = bubble === null ? "" : `, bubble ${(100 * bubble).toFixed(1)}%`
      return `${heading ? `${heading}: ` : ""}${timeText(makespan, 4)}${share}`
    }

    // from, to: seconds at the ends of the axis, behind the timeline's begin. most: of the tallest memory curve.
    svg({ width, row, from, to, most, selected }) {
      const room = width - LEFT - RIGHT
      const scale = room / (to - from)
      const g = { row, from, to, most, scale, room, x: (at) => (at - this.begin - from) * scale }
      const ranks = Array.from({ length: this.P }, (_, rank) => rank)
      const inside = ranks.flatMap((rank) => [...this.unitParts(rank, g), ...this.memoryParts(rank, g)])
      if (selected !== null) {
        const [x, y] = [g.x(this.timeline.start[selected]), (this.rankOf(selected) + UNITS_TOP) * row]
        const width = Math.max(3, g.x(this.timeline.end[selected]) - x)
        const box = rect(x, y, width, (UNITS_BOTTOM - UNITS_TOP) * row, "none")
        inside.push(box.replace("/>", ` stroke="${INK}" stroke-width="2"/>`))
      }
      return (
        `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${this.P * row + AXIS}">${LATER}` +
        `${this.gridParts(g).join("")}<svg x="${LEFT}" width="${room}" height="${this.P * row}">` +
        `${inside.join("")}${this.pathPart(g)}</svg>${ranks.map((rank) => this.rankName(rank, g)).join("")}</svg>`
      )
    }

    gridParts({ row, from, to, scale, room }) {
      const [second, name] = unitOfTime(to - from)
      const wanted = Math.max(2, Math.floor(room / 90))
      const power = 10 ** Math.floor(Math.log10((to - from) / second / wanted))
      const step = second * power * [1, 2, 5, 10].find((m) => (to - from) / second / (m * power) <= wanted)
      const parts = []
      for (let n = Math.ceil(from / step - 1e-9); n * step <= to + 1e-9 * step; n++) {
        const x = Math.round(LEFT + (n * step - from) * scale)
        const text = `${digits((n * step) / second, 6)} ${name}`
        parts.push(rect(x, 0, 1, this.P * row + 4, GRID), label(x, this.P * row + 15, 11, FAINT, "middle", text))
      }
      return parts
    }

    rankName(rank, { row }) {
      const { memory } = this.timeline
      const most = amountText(memory, memory.total[rank], 3).replace(/ micro-batch(es)?/, "")
      const middle = (top, bottom) => (rank + (top + bottom) / 2) * row
      const name = label(4, middle(UNITS_TOP, UNITS_BOTTOM), 12, INK, "start", `rank ${rank}`)
      return name + label(4, middle(MEMORY_TOP, MEMORY_BOTTOM), 10, FAINT, "start", `peak ${most}`)
    }

    unitParts(rank, { row, scale, room, x }) {
      const { first, start, end, pass, stage, microbatch } = this.timeline
      const [top, height] = [(rank + UNITS_TOP) * row, (UNITS_BOTTOM - UNITS_TOP) * row]
      const hasRoom = ({ longest }) => LETTER * longest + 2 <= this.shortest * scale // in all units
      const { write } = this.forms.find(hasRoom) ?? this.forms[this.forms.length - 1]
      const [boxes, parts] = [new Map(), []] // of each colour one path of all its units; what lies on them
      let [begin, behind, longest] = [0, -Infinity, -1] // of what is not drawn yet: in a pixel, the longest unit
      for (let i = first[rank]; i < first[rank + 1]; i++) {
        if (x(end[i]) < 0 || x(start[i]) > room) continue
        const [left, right] = [Math.max(0, x(start[i])), Math.min(room, x(end[i]))]
        if (end[i] === start[i]) { // it takes none of the rank's time: a mark
          parts.push(rect(left - 1, top + 0.3 * height, 2, 0.7 * height, INK))
          continue
        }
        if (left > behind + 0.25) [begin, longest] = [left, -1]
        behind = right
        if (longest < 0 || end[i] - start[i] > end[longest] - start[longest]) longest = i
        const isLast = i + 1 === first[rank + 1] || x(start[i + 1]) > right + 0.25
        if (right - begin < 0.7 && !isLast) continue
        const { colors } = this.style.passes[pass[longest]]
        const { fill, ink } = colors[microbatch[longest] % colors.length]
        const width = Math.max(right - begin - (right - begin > 5 ? 1 : 0), 0.7)
        const edge = round(begin)
        boxes.set(fill, `${boxes.get(fill) ?? ""}M${edge} ${round(top)}h${round(width)}v${round(height)}H${edge}z`)
        if (stage[i] !== this.firstStage[rank] && width > 6) parts.push(rect(begin, top, width, height, "url(#later)"))
        const name = width > LETTER ? write(i) : ""
        if (name && LETTER * name.length <= width)
          parts.push(label(begin + width / 2, top + height / 2, 10.5, ink, "middle", name))
        ;[begin, longest] = [right, -1]
      }
      return [...Array.from(boxes, ([fill, d]) => `<path d="${d}" fill="${fill}"/>`), ...parts]
    }

    // Calls visit(from, to, tops) while a rank holds the same; tops: of each holding, with those below it.
    walkMemory(rank, visit) {
      const { first, start, end, memory } = this.timeline
      if (first[rank] === first[rank + 1]) return
      const held = this.style.holdings.map(({ name }) => memory.constant[name]?.[rank] ?? 0)
      let last = start[first[rank]]
      const settle = (until) => {
        let sum = 0
        if (until > last) visit(last, until, held.map((x) => (sum += x)))
        last = until
      }
      for (let i = memory.first[rank]; i < memory.first[rank + 1]; i++) {
        settle(memory.when[i])
        held[memory.holding[i]] += memory.by[i]
      }
      settle(end[first[rank + 1] - 1])
    }

    memoryParts(rank, { row, most, room, x }) {
      const columns = [] // of pixels: the tops where most is held in them
      const last = this.style.holdings.length - 1
      this.walkMemory(rank, (from, to, tops) => {
        for (let c = Math.max(0, Math.floor(x(from))); c <= Math.min(x(to), room); c++)
          if (!(columns[c]?.[last] > tops[last])) columns[c] = tops
      })
      const [base, scale] = [(rank + MEMORY_BOTTOM) * row, ((MEMORY_BOTTOM - MEMORY_TOP) * row) / most]
      const parts = []
      for (let h = last; h >= 0; h--) {
        let [line, before, isSeen] = [`M0 ${round(base)}`, 0, false]
        for (let c = 0; c <= room; c++) {
          const top = columns[c]?.[h] ?? 0
          isSeen ||= top > (columns[c]?.[h - 1] ?? 0)
          if (top !== before) line += `H${c}V${round(base - scale * (before = top))}`
        }
        if (isSeen) parts.push(`<path d="${line}H${room}V${round(base)}Z" fill="${this.style.holdings[h].color}"/>`)
      }
      return parts
    }

    // A line under the units of the critical path, and from each to the next.
    pathPart({ row, room, x }) {
      const { start, end, path } = this.timeline
      const isSeen = (i) => i !== undefined && x(end[i]) >= 0 && x(start[i]) <= room
      const seen = (path ?? []).filter((i) => isSeen(i))
      if (seen.length === 0 || seen.length > MOST_OF_PATH) return ""
      const line = Array.from(path, (i, at) => {
        const y = round((this.rankOf(i) + PATH) * row)
        return isSeen(i) ? `${isSeen(path[at - 1]) ? "L" : "M"}${round(x(start[i]))} ${y}L${round(x(end[i]))} ${y}` : ""
      })
      return `<path d="${line.join("")}" fill="none" stroke="${INK}" stroke-width="2"/>`
    }

    // The number of the unit at a moment of a rank, -1 if there is none within `near` seconds.
    unitAt(rank, moment, near) {
      const { first, start, end } = this.timeline
      let [best, least] = [-1, near]
      for (let i = first[rank]; i < first[rank + 1] && least > 0; i++) {
        const away = Math.max(start[i] - moment, moment - end[i], 0)
        if (away < least) [best, least] = [i, away]
      }
      return best
    }

    // What a unit comes after: the units whose results it takes, and the one before it on its rank.
    before(i) {
      const { first, inputs } = this.timeline
      const units = Array.from(inputs.units.slice(inputs.first[i], inputs.first[i + 1]))
      return first.includes(i) || units.includes(i - 1) ? units : [...units, i - 1]
    }

    // What is told of a unit: pairs of a label and a text.
    tellUnit(i) {
      const { pass, stage, start, end, slack } = this.timeline
      const [second, unit] = unitOfTime(this.end - this.begin)
      const time = (x) => `${digits(x / second, 6)} ${unit}`
      const at = (x) => time(x - this.begin)
      const list = (units, told) => units.map((j) => `${this.name(j)} on rank ${this.rankOf(j)}, ${told(j)}`).join("; ")
      const earlier = this.before(i)
      const later = Array.from(pass.keys()).filter((j) => this.before(j).includes(i))
      const told = [
        ["unit", `${this.name(i)}, ${this.style.passes[pass[i]].text}`],
        ["rank", `${this.rankOf(i)}, stage ${stage[i]}`],
        ["time", `${at(start[i])} to ${at(end[i])}, ${time(end[i] - start[i])} long`],
        ["after", list(earlier.sort((a, b) => end[b] - end[a]), (j) => `ended at ${at(end[j])}`) || "nothing"],
        ["before", list(later.sort((a, b) => start[a] - start[b]), (j) => `from ${at(start[j])}`) || "nothing"],
      ]
      if (slack === null) return told
      return [...told, ["slack", this.critical.has(i) ? "on the critical path" : `may take ${time(slack[i])} longer`]]
    }

    // What a rank holds at a moment; null: nothing.
    tellMemory(rank, moment) {
      const { memory } = this.timeline
      let told = null
      this.walkMemory(rank, (from, to, tops) => {
        if (moment < from || moment >= to) return
        const amount = (x) => amountText(memory, x)
        const all = `${amount(tops[tops.length - 1])} of at most ${amount(memory.total[rank])}`
        told = [["rank", `${rank}`], ["holds", all]]
        const kinds = this.style.holdings.map(({ text }, h) => [text, tops[h] - (tops[h - 1] ?? 0)]).reverse()
        if (memory.whole === null) told.push(...kinds.filter(([, x]) => x > 0).map(([text, x]) => [text, amount(x)]))
      })
      return told
    }
  }

  // -- timelines on a page ------------------------------------------------------------------------------------------

  class Timelines {
    // root: an element to fill. style: of units and holdings, as view/style.py gives them. wheelZooms: also where no
    // timeline is focused and without Ctrl; else the page scrolls.
    constructor(root, style, { wheelZooms = true } = {}) {
      Object.assign(this, { root, style, wheelZooms, pictures: [], frames: [], from: 0, to: 1, pointers: new Map() })
      this.selected = null // {index, unit}
      this.legend = element("div", { className: "timeline-legend" })
      this.body = element("div")
      this.tip = element("div", { className: "timeline-tip", hidden: true })
      this.said = element("div", { className: "timeline-said", ariaLive: "polite" })
      root.classList.add("timelines")
      root.append(this.legend, this.body, this.said, this.tip)
      new ResizeObserver(() => this.draw()).observe(root)
    }

    // Timelines, one above the other. keepsView: the time axis stays as it is.
    show(timelines, { keepsView = false } = {}) {
      const isWhole = !keepsView || this.from === this.whole?.[0]
      this.pictures = timelines.map((timeline) => new Picture(timeline, this.style))
      const longest = Math.max(0, ...this.pictures.map(({ begin, end }) => end - begin)) || 1
      this.whole = [-0.01 * longest, 1.01 * longest]
      if (isWhole) [this.from, this.to] = this.whole
      this.frames = this.pictures.map((picture, index) => this.frame(picture, index))
      this.body.replaceChildren(...this.frames.map(({ box }) => box))
      this.selected = null
      this.tip.hidden = true
      this.drawLegend()
      this.drawNow()
    }

    frame(picture, index) {
      const keys = "Arrow keys go from unit to unit; plus and minus zoom, 0 shows the whole."
      const ariaLabel = `Timeline of ${picture.heading()}. ${keys}`
      const plot = element("div", { className: "timeline-plot", tabIndex: 0, role: "img", ariaLabel })
      const on = (type, act) => plot.addEventListener(type, (event) => act(event), { passive: false })
      on("wheel", (event) => this.wheel(event))
      on("pointerdown", (event) => this.press(event))
      on("pointermove", (event) => this.move(event, index))
      on("pointerup", (event) => this.pointers.delete(event.pointerId))
      on("pointercancel", (event) => this.pointers.delete(event.pointerId)) // the page scrolls
      on("click", (event) => this.select(event, index)) // a tap, too
      on("pointerleave", ({ pointerType }) => pointerType === "mouse" && (this.tip.hidden = true))
      on("keydown", (event) => this.key(event, index))
      const note = element("p", { className: "timeline-note", textContent: picture.timeline.note ?? "" })
      const heading = element("h3", { textContent: picture.heading() })
      return { box: element("section", { className: "timeline" }, heading, note, plot), heading, plot }
    }

    // What the tallest memory curve holds, in the scale of this picture: curves of all have one.
    most({ timeline: { memory } }) {
      const one = ({ whole }) => whole ?? 1
      const isAlike = ({ whole }) => (whole === null) === (memory.whole === null)
      const alike = this.pictures.map((picture) => picture.timeline.memory).filter(isAlike)
      return (Math.max(...alike.map((m) => Math.max(...m.total) / one(m))) || 1) * one(memory)
    }

    width() {
      return Math.max(200, this.body.clientWidth)
    }

    // The height of a rank's row, so that all timelines are seen at once where that can be.
    row() {
      return Math.max(30, Math.min(56, 420 / this.pictures.reduce((sum, { P }) => sum + P, 0)))
    }

    svg(index, width, row) {
      const picture = this.pictures[index]
      const selected = this.selected?.index === index ? this.selected.unit : null
      return picture.svg({ width, row, from: this.from, to: this.to, most: this.most(picture), selected })
    }

    draw() {
      this.waits ??= requestAnimationFrame(() => this.drawNow())
    }

    drawNow() {
      cancelAnimationFrame(this.waits)
      this.waits = null
      this.frames.forEach(({ plot }, index) => (plot.innerHTML = this.svg(index, this.width(), this.row())))
    }

    drawLegend() {
      const swatch = (background, text) => {
        const box = element("i")
        box.style.background = background
        return element("span", {}, box, text)
      }
      const all = this.pictures.map((picture) => picture.timeline)
      const isThere = (pass) => all.some((t) => t.pass.includes(pass))
      const isTimed = (pass) => all.some((t) => t.pass.some((p, i) => p === pass && t.end[i] > t.start[i]))
      const units = this.style.passes.flatMap(({ colors, text }, pass) =>
        isThere(pass) ? [swatch(isTimed(pass) ? colors[0].fill : INK, text)] : [],
      )
      if (this.pictures.some(({ hasLater }) => hasLater))
        units.push(swatch("repeating-linear-gradient(135deg,#777 0 2px,#ddd 2px 4px)", "later stages of a rank"))
      if (this.pictures.some(({ critical }) => critical.size > 0)) units.push(element("span", {}, "— critical path"))
      const isInBytes = all.some(({ memory }) => memory.whole === null)
      const isHeld = ({ name }, h) =>
        all.some(({ memory }) => memory.constant[name]?.some((x) => x > 0) || memory.holding.includes(h))
      const text = (one) => (isInBytes ? one.text : "activations of live units, in micro-batches")
      const held = this.style.holdings.filter(isHeld).map((one) => swatch(one.color, text(one)))
      this.legend.replaceChildren(
        element("div", {}, "A colour is a micro-batch: ", ...units),
        element("div", {}, "Memory, under each rank: ", ...held.reverse()),
      )
    }

    // -- moving about -----------------------------------------------------------------------------------------------

    set(from, to) {
      const span = this.whole[1] - this.whole[0]
      const width = Math.min(Math.max(to - from, span / 1e6), 1.1 * span)
      this.from = Math.min(Math.max(from, this.whole[0] - 0.05 * span), this.whole[1] + 0.05 * span - width)
      this.to = this.from + width
      this.draw()
    }

    // about: a share of the axis that stays where it is.
    zoom(factor, about = 0.5) {
      const middle = this.from + about * (this.to - this.from)
      this.set(middle - factor * (middle - this.from), middle + factor * (this.to - middle))
    }

    shareAt({ clientX, currentTarget }) {
      return (clientX - currentTarget.getBoundingClientRect().left - LEFT) / (this.width() - LEFT - RIGHT)
    }

    wheel(event) {
      if (!this.wheelZooms && !event.ctrlKey && document.activeElement !== event.currentTarget) return
      event.preventDefault()
      this.zoom(Math.exp(event.deltaY / 700), this.shareAt(event))
    }

    press(event) {
      event.currentTarget.setPointerCapture(event.pointerId)
      this.pointers.set(event.pointerId, this.shareAt(event))
      this.tip.hidden = true
    }

    // A tap or click tells what lies under it, as hovering does.
    select({ clientX, clientY }, index) {
      const unit = this.tellAt(index, clientX, clientY, FINGER)
      this.selected = unit < 0 ? null : { index, unit }
      this.draw()
    }

    move(event, index) {
      if (!this.pointers.has(event.pointerId)) {
        this.tellAt(index, event.clientX, event.clientY, 3)
        return
      }
      const [share, before] = [this.shareAt(event), this.pointers.get(event.pointerId)]
      this.pointers.set(event.pointerId, share)
      const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, still]) => still)
      const by = (share - before) * (this.to - this.from)
      if (other === undefined) this.set(this.from - by, this.to - by)
      else if (Math.abs(share - other) > 0.02) this.zoom(Math.abs(before - other) / Math.abs(share - other), other)
    }

    // Tells what lies at a place of the window; the number of the unit at most `near` pixels away, or -1.
    tellAt(index, clientX, clientY, near) {
      const picture = this.pictures[index]
      const box = this.frames[index].plot.getBoundingClientRect()
      const seconds = (this.to - this.from) / (this.width() - LEFT - RIGHT) // of a pixel
      const moment = picture.begin + this.from + (clientX - box.left - LEFT) * seconds
      const row = (clientY - box.top) / this.row()
      const rank = Math.floor(row)
      let [unit, told] = [-1, null]
      if (rank >= 0 && rank < picture.P) {
        if (row - rank < PATH) unit = picture.unitAt(rank, moment, near * seconds)
        else told = picture.tellMemory(rank, moment)
      }
      this.tell(unit < 0 ? told : picture.tellUnit(unit), clientX, clientY)
      return unit
    }

    tell(told, x, y) {
      this.tip.hidden = told === null
      if (told === null) return
      const line = ([name, text]) => [element("b", { textContent: name }), element("span", { textContent: text })]
      this.tip.replaceChildren(...told.flatMap(line))
      const { offsetWidth, offsetHeight } = this.tip
      const top = y + 18 + offsetHeight > innerHeight ? y - offsetHeight - 12 : y + 18
      this.tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - offsetWidth - 6))}px`
      this.tip.style.top = `${Math.max(4, top)}px`
    }

    // Arrows go from unit to unit, + and - zoom, 0 and Escape show the whole.
    key(event, index) {
      if (event.ctrlKey || event.metaKey || event.altKey) return
      if (event.key === "+" || event.key === "=") this.zoom(0.7)
      else if (event.key === "-") this.zoom(1 / 0.7)
      else if (event.key === "0" || event.key === "Escape") {
        this.selected = null
        this.tip.hidden = true
        this.set(...this.whole)
      } else if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(event.key)) this.step(index, event.key)
      else return
      event.preventDefault()
    }

    // Selects the unit beside the selected one, or above or below it; at first, the first.
    step(index, key) {
      const picture = this.pictures[index]
      const { first, start, end } = picture.timeline
      const old = this.selected?.index === index ? this.selected.unit : -1
      const rank = picture.rankOf(Math.max(0, old))
      const other = Math.min(picture.P - 1, Math.max(0, rank + (key === "ArrowUp" ? -1 : 1)))
      let unit = 0
      if (key === "ArrowLeft") unit = Math.max(first[rank], old - 1)
      else if (key === "ArrowRight") unit = Math.min(first[rank + 1] - 1, old + 1)
      else if (old >= 0) unit = picture.unitAt(other, start[old] + 1e-9 * this.whole[1], Infinity)
      this.selected = { index, unit }
      const [begin, stop] = [start[unit] - picture.begin, end[unit] - picture.begin]
      const half = (this.to - this.from) / 2
      if (begin < this.from || stop > this.to) this.set(begin - half, begin + half)
      this.drawNow()
      const told = picture.tellUnit(unit)
      const box = this.frames[index].plot.getBoundingClientRect()
      const middle = ((begin + stop) / 2 - this.from) / (this.to - this.from)
      const x = box.left + LEFT + middle * (this.width() - LEFT - RIGHT)
      this.tell(told, x, box.top + (picture.rankOf(unit) + UNITS_BOTTOM) * this.row())
      this.said.textContent = told.map(([name, text]) => `${name}: ${text}`).join(". ")
    }
  }

  return Object.assign(Timelines, { element, digits, timeText })
})()
