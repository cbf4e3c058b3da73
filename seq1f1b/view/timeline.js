// timeline.js - timelines on a page, drawn by picture.js. Several share one time axis, which a wheel, a drag, two
// fingers or keys zoom and move. The HTML page of `seq1f1b draw --html` and the schedule explorer of the documentation
// are made of it.
"use strict"

const Timelines = (() => {
  const { Picture, palette, layout, firstAfter, LIGHT, ROWS } = Pictures
  const { UNITS_TOP, UNITS_BOTTOM, PATH, MEMORY_TOP, MEMORY_BOTTOM } = ROWS
  const FINGER = 10 // pixels that a tap may be off
  const MOST_OF_PATH = 500 // units of a critical path that is shown at first: more would hide the others

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties)
    made.append(...children)
    return made
  }

  class Timelines {
    // Data whose arrays are written as base64 of little-endian numbers: {array: their type, base64}.
    static unpack(data) {
      if (data === null || typeof data !== "object") return data
      if (data.base64 !== undefined) {
        const bytes = Uint8Array.from(atob(data.base64), (c) => c.charCodeAt(0))
        return new globalThis[data.array](bytes.buffer)
      }
      if (Array.isArray(data)) return data.map(Timelines.unpack)
      return Object.fromEntries(Object.entries(data).map(([name, value]) => [name, Timelines.unpack(value)]))
    }

    // root: an element to fill. style: of units and holdings, as view/style.py gives them. wheelZooms: also where no
    // timeline is focused and without Ctrl; else the page scrolls.
    constructor(root, style, { wheelZooms = true } = {}) {
      Object.assign(this, { root, style, wheelZooms, pictures: [], frames: [], from: 0, to: 1, pointers: new Map() })
      this.tapped = null // where a finger has come down, until it moves or another one comes
      this.colors = palette(style)
      this.legend = element("div", { className: "timeline-legend" })
      this.body = element("div")
      this.tip = element("div", { className: "timeline-tip", hidden: true })
      this.said = element("div", { className: "timeline-said" })
      this.said.setAttribute("aria-live", "polite")
      root.classList.add("timelines")
      root.append(this.toolbar(), this.legend, this.body, this.said, this.tip)
      new ResizeObserver(() => this.draw()).observe(root)
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw())
      addEventListener("pointerdown", ({ pointerType }) => { // what a tap has told stays until the next touch
        if (pointerType !== "mouse") this.tip.hidden = true
      })
    }

    toolbar() {
      const button = (text, title, act) => {
        const made = element("button", { type: "button", textContent: text, title, onclick: act })
        made.setAttribute("aria-label", title)
        return made
      }
      this.pathBox = element("input", { type: "checkbox", checked: true, onchange: () => this.draw() })
      this.pathLabel = element("label", {}, this.pathBox, " critical path")
      return element(
        "div", { className: "timeline-tools" },
        button("+", "Zoom in", () => this.zoom(0.7)), button("−", "Zoom out", () => this.zoom(1 / 0.7)),
        button("Whole", "Show the whole step", () => this.reset()), this.pathLabel,
      )
    }

    // Timelines, one above the other. keepsView: the time axis stays as it is.
    show(timelines, { keepsView = false } = {}) {
      const wasWhole = !keepsView || this.from === this.whole?.[0]
      this.pictures = timelines.map((timeline) => new Picture(timeline, this.style, this.colors))
      const longest = Math.max(...this.pictures.map((p) => p.end - p.begin)) || 1
      this.whole = [-0.01 * longest, 1.01 * longest]
      if (wasWhole) [this.from, this.to] = this.whole
      const paths = this.pictures.map((p) => p.timeline.path?.length ?? 0)
      this.pathLabel.hidden = Math.max(...paths) === 0
      if (!keepsView) this.pathBox.checked = Math.max(...paths) <= MOST_OF_PATH
      while (this.frames.length > timelines.length) this.frames.pop().box.remove()
      while (this.frames.length < timelines.length) this.frames.push(this.frame(this.frames.length))
      this.selected = null
      this.tip.hidden = true
      this.drawLegend()
      this.drawNow()
    }

    frame(index) {
      const heading = element("h3")
      const note = element("p", { className: "timeline-note" })
      const canvas = element("canvas", { tabIndex: 0 })
      canvas.setAttribute("role", "img")
      const box = element("section", { className: "timeline" }, heading, note, canvas)
      this.body.append(box)
      canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false })
      canvas.addEventListener("pointerdown", (event) => this.press(event))
      canvas.addEventListener("pointermove", (event) => this.move(event, index))
      canvas.addEventListener("pointerup", (event) => this.release(event, index))
      canvas.addEventListener("pointercancel", (event) => { // the page scrolls
        this.pointers.delete(event.pointerId)
        this.tapped = null
      })
      canvas.addEventListener("pointerleave", ({ pointerType }) => {
        if (pointerType !== "touch") this.tip.hidden = true
      })
      canvas.addEventListener("dblclick", () => this.reset())
      canvas.addEventListener("keydown", (event) => this.key(event, index))
      canvas.addEventListener("blur", () => this.draw())
      return { box, heading, note, canvas }
    }

    theme() {
      const css = getComputedStyle(this.root)
      const read = (name) => css.getPropertyValue(`--timeline-${name}`).trim() || LIGHT[name]
      return Object.fromEntries(Object.keys(LIGHT).map((name) => [name, read(name)]))
    }

    // The height of a rank's row, so that all timelines are seen at once where that can be.
    row() {
      const ranks = this.pictures.reduce((sum, picture) => sum + picture.P, 0)
      return Math.max(30, Math.min(56, 420 / ranks))
    }

    // What the tallest memory curve holds, in the scale of this picture: curves of all have one.
    most(picture) {
      const one = ({ memory }) => (memory.kind === "bytes" ? 1 : memory.whole)
      const known = this.pictures.map((p) => p.timeline).filter((t) => t.memory !== null)
      const alike = known.filter((t) => (t.memory.kind === "bytes") === (picture.timeline.memory.kind === "bytes"))
      return (Math.max(...alike.map((t) => Math.max(...t.memory.total) / one(t))) || 1) * one(picture.timeline)
    }

    geometry(picture) {
      const width = Math.max(200, this.body.clientWidth)
      return layout(picture, width, this.row(), [this.from, this.to])
    }

    draw() {
      if (this.waits) return
      this.waits = true
      requestAnimationFrame(() => {
        this.waits = false
        this.drawNow()
      })
    }

    drawNow() {
      const theme = this.theme()
      const sharpness = window.devicePixelRatio || 1
      this.pictures.forEach((picture, index) => {
        const { canvas, heading, note } = this.frames[index]
        const g = this.geometry(picture)
        heading.textContent = picture.heading()
        note.textContent = picture.timeline.note ?? ""
        const keys = "Arrow keys go from unit to unit; plus and minus zoom."
        canvas.setAttribute("aria-label", `Timeline of ${picture.heading()}. ${keys}`)
        if (canvas.width !== Math.round(g.width * sharpness) || canvas.height !== Math.round(g.height * sharpness)) {
          canvas.width = Math.round(g.width * sharpness)
          canvas.height = Math.round(g.height * sharpness)
          canvas.style.height = `${g.height}px`
        }
        const ctx = canvas.getContext("2d")
        ctx.setTransform(sharpness, 0, 0, sharpness, 0, 0)
        picture.draw(ctx, g, theme, picture.timeline.memory === null ? 1 : this.most(picture), this.pathBox.checked)
        if (this.selected !== null && this.selected.index === index) this.outline(ctx, picture, g, theme)
      })
    }

    outline(ctx, picture, g, theme) {
      const { unit } = this.selected
      const left = g.x(picture.timeline.start[unit])
      const width = Math.max(3, g.x(picture.timeline.end[unit]) - left)
      const top = (picture.rankOf(unit) + UNITS_TOP) * g.row
      ctx.strokeStyle = theme.ink
      ctx.lineWidth = 2
      ctx.strokeRect(left, top, width, (UNITS_BOTTOM - UNITS_TOP) * g.row)
    }

    drawLegend() {
      const swatch = (color, text) => {
        const box = element("i")
        box.style.background = color
        return element("span", {}, box, text)
      }
      const all = this.pictures.map((picture) => picture.timeline)
      const passes = this.style.passes.filter((_, pass) => all.some((t) => t.pass.includes(pass)))
      const takesTime = (pass, t) => t.pass.some((p, i) => this.style.passes[p] === pass && t.end[i] > t.start[i])
      const timed = passes.filter((pass) => all.some((t) => takesTime(pass, t)))
      const units = timed.map((pass) => swatch(this.colors(this.style.passes.indexOf(pass), 0).css, pass.text))
      const marks = passes.filter((pass) => !timed.includes(pass)).map(({ text }) => text)
      if (marks.length) units.push(element("span", {}, element("i", { className: "mark" }), marks.join(", ")))
      if (this.pictures.some((picture) => picture.hasLater()))
        units.push(swatch("repeating-linear-gradient(135deg,#777 0 2px,#ddd 2px 4px)", "later stages of a rank"))
      const isIn = (kind) => all.some((t) => t.memory?.kind === kind)
      const isHeld = ({ name }, h) => all.some((t) => t.memory !== null &&
        (t.memory.constant[name]?.some((x) => x > 0) || t.memory.changes.holding.includes(h)))
      const text = (one) => (isIn("bytes") ? one.text : "activations of live units")
      const held = this.style.holdings.filter(isHeld).map((one) => swatch(one.color, text(one)))
      this.legend.replaceChildren(element("div", {}, "A colour is a micro-batch: ", ...units))
      const unit = isIn("microbatches") && !isIn("bytes") ? ", in micro-batches" : ""
      if (held.length) this.legend.append(element("div", {}, `Memory, under each rank${unit}: `, ...held.reverse()))
    }

    // -- moving about -----------------------------------------------------------------------------------------------

    set(from, to) {
      const [begin, end] = this.whole
      const least = (end - begin) / 1e6
      const width = Math.min(Math.max(to - from, least), 1.1 * (end - begin))
      const slide = Math.min(Math.max(from, begin - 0.05 * (end - begin)), end + 0.05 * (end - begin) - width)
      ;[this.from, this.to] = [slide, slide + width]
      this.draw()
    }

    reset() {
      ;[this.from, this.to] = this.whole
      this.draw()
    }

    // about: a share of the axis that stays where it is.
    zoom(factor, about = 0.5) {
      const middle = this.from + about * (this.to - this.from)
      this.set(middle - factor * (middle - this.from), middle + factor * (this.to - middle))
    }

    shareAt(event) {
      const box = event.currentTarget.getBoundingClientRect()
      const g = this.geometry(this.pictures[0])
      return (event.clientX - box.left - g.left) / (g.right - g.left)
    }

    wheel(event) {
      if (!this.wheelZooms && !event.ctrlKey && document.activeElement !== event.currentTarget) return
      event.preventDefault()
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const by = ((event.deltaX || event.deltaY) / 1000) * (this.to - this.from)
        this.set(this.from + by, this.to + by)
      } else this.zoom(Math.exp(event.deltaY / 700), this.shareAt(event))
    }

    press(event) {
      event.currentTarget.setPointerCapture(event.pointerId)
      this.pointers.set(event.pointerId, this.shareAt(event))
      const isFirst = event.pointerType !== "mouse" && this.pointers.size === 1
      this.tapped = isFirst ? [event.clientX, event.clientY] : null
    }

    // A tap tells what lies under it, as hovering does.
    release(event, index) {
      this.pointers.delete(event.pointerId)
      if (this.tapped === null) return
      const [x, y] = this.placeOn(index, ...this.tapped)
      const found = this.at(index, x, y, FINGER)
      this.selected = found === null || found.unit < 0 ? null : { index, unit: found.unit }
      this.tell(found?.told ?? null, ...this.tapped)
      this.tapped = null
      this.draw()
    }

    move(event, index) {
      if (!this.pointers.has(event.pointerId)) return this.hover(event, index)
      if (this.tapped !== null) {
        if (Math.hypot(event.clientX - this.tapped[0], event.clientY - this.tapped[1]) < FINGER) return
        this.tapped = null
      }
      const share = this.shareAt(event)
      const before = this.pointers.get(event.pointerId)
      const others = [...this.pointers].filter(([id]) => id !== event.pointerId)
      this.pointers.set(event.pointerId, share)
      this.tip.hidden = true
      const width = this.to - this.from
      if (others.length === 1) {
        const [, still] = others[0]
        if (Math.abs(share - still) > 0.02) this.zoom(Math.abs(before - still) / Math.abs(share - still), still)
      } else this.set(this.from - (share - before) * width, this.to - (share - before) * width)
    }

    hover(event, index) {
      const [x, y] = this.placeOn(index, event.clientX, event.clientY)
      this.tell(this.at(index, x, y, 3)?.told ?? null, event.clientX, event.clientY)
    }

    placeOn(index, x, y) {
      const box = this.frames[index].canvas.getBoundingClientRect()
      return [x - box.left, y - box.top]
    }

    // What is told at a place of a canvas: the number of a unit at most `near` pixels away, or -1, and the text. Null:
    // nothing.
    at(index, x, y, near) {
      const picture = this.pictures[index]
      const g = this.geometry(picture)
      const rank = Math.floor(y / g.row)
      if (rank < 0 || rank >= picture.P || x < g.left - 2 || x > g.right + 2) return null
      const inRow = y / g.row - rank
      if (inRow < (UNITS_BOTTOM + PATH) / 2) {
        const unit = picture.unitAt(rank, g.time(x), near / g.scale)
        return unit < 0 ? null : { unit, told: picture.tellUnit(unit) }
      }
      if (picture.timeline.memory === null) return null
      const height = ((MEMORY_BOTTOM - inRow) / (MEMORY_BOTTOM - MEMORY_TOP)) * this.most(picture)
      return { unit: -1, told: picture.tellMemory(rank, g.time(x), height) }
    }

    tell(told, x, y) {
      this.tip.hidden = told === null
      if (told === null) return
      const line = ([label, text]) => [element("b", { textContent: label }), element("span", { textContent: text })]
      this.tip.replaceChildren(...told.flatMap(line))
      const { offsetWidth, offsetHeight } = this.tip
      const left = Math.min(x + 14, innerWidth - offsetWidth - 6)
      this.tip.style.left = `${Math.max(4, left)}px`
      this.tip.style.top = `${y + 18 + offsetHeight > innerHeight ? Math.max(4, y - offsetHeight - 12) : y + 18}px`
    }

    // Arrows go from unit to unit, Shift with them moves the axis, + and - zoom, 0 and Escape show the whole.
    key(event, index) {
      const width = this.to - this.from
      const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key]
      if (event.ctrlKey || event.metaKey || event.altKey) return
      if (event.key === "+" || event.key === "=") this.zoom(0.7)
      else if (event.key === "-") this.zoom(1 / 0.7)
      else if (event.key === "0" || event.key === "Escape") {
        this.selected = null
        this.tip.hidden = true
        this.reset()
      } else if (side && event.shiftKey) this.set(this.from + 0.2 * side * width, this.to + 0.2 * side * width)
      else if (side || ["ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) this.step(index, event.key)
      else return
      event.preventDefault()
    }

    // Selects the unit beside the selected one, or above or below it.
    step(index, key) {
      const picture = this.pictures[index]
      const { first, start, end } = picture.timeline
      const old = this.selected !== null && this.selected.index === index ? this.selected.unit : null
      let unit = old ?? first[0]
      if (old !== null) {
        const rank = picture.rankOf(old)
        const last = first[rank + 1] - 1
        if (key === "Home") unit = first[rank]
        else if (key === "End") unit = last
        else if (key === "ArrowLeft") unit = Math.max(first[rank], old - 1)
        else if (key === "ArrowRight") unit = Math.min(last, old + 1)
        else {
          const other = Math.min(picture.P - 1, Math.max(0, rank + (key === "ArrowUp" ? -1 : 1)))
          unit = Math.min(first[other + 1] - 1, firstAfter(picture.timeline, other, start[old] + 1e-9 * this.whole[1]))
        }
      }
      this.selected = { index, unit }
      const [begin, stop] = [start[unit] - picture.begin, end[unit] - picture.begin]
      const half = (this.to - this.from) / 2
      if (begin < this.from || stop > this.to) this.set(begin - half, begin + half)
      this.drawNow()
      const told = picture.tellUnit(unit)
      const g = this.geometry(picture)
      const box = this.frames[index].canvas.getBoundingClientRect()
      const middle = g.x((start[unit] + end[unit]) / 2)
      this.tell(told, box.left + middle, box.top + (picture.rankOf(unit) + UNITS_BOTTOM) * g.row)
      this.said.textContent = told.map(([label, text]) => `${label}: ${text}`).join(". ")
    }
  }

  return Timelines
})()
