// picture.js - draws one timeline on a canvas: ranks x time, units with their names, and the memory of each rank below
// them; and tells what lies where. timeline.js shows pictures on a page.
//
// A timeline is plain data. Units of all ranks lie one rank after another, each rank's in run order:
//   heading, note                    text; a sentence below it, or none
//   makespan, bubble                 seconds; a share of the ranks' time, or null
//   first                            [rank + 1] number of each rank's first unit
//   pass, stage, microbatch, segment [unit]; start, end [unit] seconds
//   slack, path                      [unit] seconds, or null; numbers of units, or null
//   inputs                           {first [unit + 1], units}: what each unit comes after
//   memory                           {kind, whole, total [rank], constant {name: [rank]}, changes}, where
//     kind    "bytes", "units" (numbers of live units), or "microbatches" (`whole` is one)
//     changes {first [rank + 1], when, by, holding}: by how much a holding changes; its number among `holdings`
"use strict"

const Pictures = (() => {
  const FONT = "system-ui, sans-serif"
  const [UNITS_TOP, UNITS_BOTTOM, PATH, MEMORY_TOP, MEMORY_BOTTOM] = [0.05, 0.56, 0.605, 0.65, 0.98] // of a rank's row
  const AXIS = 34 // pixels below the last rank
  const LIGHT = { ground: "#ffffff", ink: "#1d2329", faint: "#6b7480", grid: "#e3e7eb", path: "#111111" }

  // -- numbers as text ----------------------------------------------------------------------------------------------

  const digits = (x, n) => String(+x.toPrecision(n))
  const unitOfTime = (seconds) => (seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"])
  const bytesText = (x, n = 4) => (x >= 2 ** 30 ? `${digits(x / 2 ** 30, n)} GiB` : `${digits(x / 2 ** 20, n)} MiB`)

  function amountText(memory, x, n = 4) {
    if (memory.kind === "bytes") return bytesText(x, n)
    if (memory.kind === "units") return `${Math.round(x)} units`
    return `${digits(x / memory.whole, n)} micro-batch${x === memory.whole ? "" : "es"}`
  }

  // -- colours ------------------------------------------------------------------------------------------------------

  // The micro-batch's hue: full for what goes back, pale for what goes forward.
  function palette(style) {
    const made = new Map()
    const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
    return (pass, microbatch) => {
      const hue = microbatch % style.microbatches.length
      const key = pass * 64 + hue
      if (!made.has(key)) {
        const { strength } = style.passes[pass]
        const rgb = channels(style.microbatches[hue]).map((c) => 1 - strength * (1 - c))
        const light = 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2] // ITU-R BT.709
        const bytes = rgb.map((c) => Math.round(255 * c))
        made.set(key, { rgb: bytes, css: `rgb(${bytes.join()})`, ink: light < 0.62 ? "#ffffff" : "#222222" })
      }
      return made.get(key)
    }
  }

  // -- what is drawn ------------------------------------------------------------------------------------------------

  // Where things lie on a picture of one timeline. `begin`: its first second; from, to: those at the ends, behind it.
  function layout({ P, begin }, width, row, ends) {
    const [from, to] = ends.map((seconds) => begin + seconds)
    const left = width < 560 ? 46 : 92
    const right = width - 10
    const scale = (right - left) / (to - from)
    return {
      P, begin, width, row, left, right, from, to, scale, height: Math.ceil(P * row + AXIS),
      x: (seconds) => left + (seconds - from) * scale,
      time: (x) => from + (x - left) / scale,
    }
  }

  // The first unit of a rank that ends after this moment. Units of a rank follow each other.
  function firstAfter(timeline, rank, moment) {
    let [low, high] = [timeline.first[rank], timeline.first[rank + 1]]
    while (low < high) {
      const middle = (low + high) >> 1
      if (timeline.end[middle] < moment) low = middle + 1
      else high = middle
    }
    return low
  }

  function drawGrid(ctx, g, theme, P) {
    ctx.fillStyle = theme.ground
    ctx.fillRect(0, 0, g.width, g.height)
    const span = g.to - g.from
    const [second, name] = unitOfTime(span)
    const wanted = Math.max(2, Math.floor((g.right - g.left) / 90))
    const power = 10 ** Math.floor(Math.log10(span / second / wanted))
    const step = second * power * [1, 2, 5, 10].find((m) => span / second / (m * power) <= wanted)
    ctx.font = `11px ${FONT}`
    ctx.textAlign = "center"
    ctx.textBaseline = "top"
    for (let n = Math.ceil((g.from - g.begin) / step - 1e-9); n * step <= g.to - g.begin + 1e-9 * step; n++) {
      const x = Math.round(g.x(g.begin + n * step))
      ctx.fillStyle = theme.grid
      ctx.fillRect(x, 0, 1, P * g.row + 4)
      ctx.fillStyle = theme.faint
      const text = `${digits((n * step) / second, 6)} ${name}`
      const half = ctx.measureText(text).width / 2
      if (x - half >= 0 && x + half <= g.width) ctx.fillText(text, x, P * g.row + 9)
    }
  }

  // Stripes over a unit of a later stage of its rank.
  function hatch(ctx, x, y, width, height, css) {
    ctx.strokeStyle = css
    ctx.lineWidth = 1.5
    ctx.beginPath()
    for (let a = 7 - height; a < width; a += 7) { // from (a, bottom) up to the right
      const begin = Math.max(0, a)
      const end = Math.min(width, a + height)
      if (end <= begin) continue
      ctx.moveTo(x + begin, y + height - (begin - a))
      ctx.lineTo(x + end, y + height - (end - a))
    }
    ctx.stroke()
  }

  // More units than pixels: each pixel takes the colours of its units, by their shares of its time.
  function drawDense(ctx, timeline, g, rank, begin, end, colors, hex) {
    const ground = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16))
    const columns = Math.ceil(g.right - g.left)
    const sums = new Float64Array(4 * columns)
    for (let i = begin; i < end; i++) {
      const left = Math.max(0, g.x(timeline.start[i]) - g.left)
      const right = Math.min(columns, g.x(timeline.end[i]) - g.left)
      const { rgb } = colors(timeline.pass[i], timeline.microbatch[i])
      for (let column = Math.floor(left); column < right; column++) {
        const share = Math.min(right, column + 1) - Math.max(left, column)
        for (let c = 0; c < 3; c++) sums[4 * column + c] += share * rgb[c]
        sums[4 * column + 3] += share
      }
    }
    const y = (rank + UNITS_TOP) * g.row
    const height = (UNITS_BOTTOM - UNITS_TOP) * g.row
    for (let column = 0; column < columns; column++) {
      const share = sums[4 * column + 3]
      if (share < 0.01) continue
      const mixed = [0, 1, 2].map((c) => Math.round(sums[4 * column + c] + Math.max(0, 1 - share) * ground[c]))
      ctx.fillStyle = `rgb(${mixed.join()})`
      ctx.fillRect(g.left + column, y, 1, height)
    }
  }

  function drawUnits(ctx, picture, g, rank, theme) {
    const { timeline, colors, widths, shortest, forms } = picture
    const begin = firstAfter(timeline, rank, g.from)
    let end = begin
    while (end < timeline.first[rank + 1] && timeline.start[end] <= g.to) end++
    if (begin === end) return
    const seconds = Math.min(g.to, timeline.end[end - 1]) - Math.max(g.from, timeline.start[begin])
    if (end - begin > (seconds * g.scale) / 1.5) {
      drawDense(ctx, timeline, g, rank, begin, end, colors, theme.ground)
      return
    }
    const y = (rank + UNITS_TOP) * g.row
    const height = (UNITS_BOTTOM - UNITS_TOP) * g.row
    ctx.textAlign = "center"
    ctx.textBaseline = "middle"
    for (const size of [11, 9]) {
      ctx.font = `${size}px ${FONT}`
      const digit = Math.max(...Array.from("0123456789", (one) => ctx.measureText(one).width))
      widths[size] ??= [digit, digit - ctx.measureText(".").width]
    }
    const takes = (letters, size, dots) => letters * widths[size][0] - dots * widths[size][1] + 2
    const hasRoom = ({ longest }) => takes(longest, 11, 1) + 2 <= shortest * g.scale // in all units
    const { write, dots } = forms.find(hasRoom) ?? forms[forms.length - 1]
    let font = 9 // as the loop has left it
    for (let i = begin; i < end; i++) {
      const left = Math.max(g.left, g.x(timeline.start[i]))
      const right = Math.min(g.right, g.x(timeline.end[i]))
      const color = colors(timeline.pass[i], timeline.microbatch[i])
      if (timeline.end[i] === timeline.start[i]) { // it takes none of the rank's time: a mark
        ctx.fillStyle = theme.ink
        ctx.fillRect(left - 1, y + 0.3 * height, 2, 0.7 * height)
        continue
      }
      const width = Math.max(right - left - (right - left > 5 ? 1 : 0), 0.7)
      ctx.fillStyle = color.css
      ctx.fillRect(left, y, width, height)
      if (timeline.stage[i] !== picture.firstStage[rank] && width > 6)
        hatch(ctx, left, y, width, height, color.ink === "#ffffff" ? "rgba(255,255,255,0.35)" : "rgba(0,0,0,0.16)")
      if (width < 8) continue
      const name = write(i)
      const size = takes(name.length, 11, dots) <= width ? 11 : 9 // the largest letters that fit
      if (takes(name.length, size, dots) > width + 1) continue
      if (font !== size) ctx.font = `${(font = size)}px ${FONT}`
      ctx.fillStyle = color.ink
      ctx.fillText(name, left + width / 2, y + height / 2 + 0.5)
    }
  }

  // Calls visit(when, held) whenever what a rank holds has changed; held: [holding]. At the end it holds nothing.
  function walkMemory(timeline, rank, holdings, visit) {
    const { changes, constant } = timeline.memory
    const [begin, end] = [timeline.first[rank], timeline.first[rank + 1]]
    if (begin === end) return
    let last = timeline.start[begin]
    const held = new Float64Array(holdings.length)
    holdings.forEach(({ name }, h) => (held[h] = constant[name] ? constant[name][rank] : 0))
    for (let i = changes.first[rank]; i < changes.first[rank + 1]; i++) {
      if (changes.when[i] !== last) {
        visit(last, held)
        last = changes.when[i]
      }
      held[changes.holding[i]] += changes.by[i]
    }
    visit(last, held)
    visit(timeline.end[end - 1], new Float64Array(holdings.length))
  }

  function drawMemory(ctx, timeline, g, rank, holdings, most) {
    const columns = Math.ceil(g.right - g.left)
    const tops = holdings.map(() => new Float32Array(columns)) // of each kind with those below it, at the column's most
    const before = new Float64Array(holdings.length)
    let from = 0
    const settle = (until) => { // `before` is held from column `from` up to this one
      let sum = 0
      for (let h = 0; h < before.length; h++) sum += before[h]
      for (let column = Math.max(0, from); column <= Math.min(until, columns - 1); column++) {
        if (sum < tops[tops.length - 1][column]) continue
        let height = 0
        for (let h = 0; h < before.length; h++) tops[h][column] = height += before[h]
      }
    }
    walkMemory(timeline, rank, holdings, (when, held) => {
      const column = Math.min(columns, Math.floor(g.x(when) - g.left))
      if (column >= 0) settle(column - 1 < from ? from : column - 1)
      from = Math.max(0, column)
      before.set(held)
    })
    const base = (rank + MEMORY_BOTTOM) * g.row
    const scale = ((MEMORY_BOTTOM - MEMORY_TOP) * g.row) / most
    for (let h = holdings.length - 1; h >= 0; h--) {
      const lower = h > 0 ? tops[h - 1] : null
      if (tops[h].every((top, column) => top === (lower ? lower[column] : 0))) continue
      ctx.fillStyle = holdings[h].color
      ctx.beginPath()
      ctx.moveTo(g.left, base)
      for (let column = 0; column < columns; column++) {
        if (column > 0 && tops[h][column] === tops[h][column - 1]) continue
        if (column > 0) ctx.lineTo(g.left + column, base - scale * tops[h][column - 1])
        ctx.lineTo(g.left + column, base - scale * tops[h][column])
      }
      ctx.lineTo(g.right, base - scale * tops[h][columns - 1])
      ctx.lineTo(g.right, base)
      ctx.closePath()
      ctx.fill()
    }
  }

  // A line under the units of the critical path, and from each to the next.
  function drawPath(ctx, timeline, g, rankOf, theme) {
    ctx.strokeStyle = theme.path
    ctx.lineWidth = 2
    ctx.beginPath()
    let last = null
    for (const i of timeline.path) {
      const y = (rankOf(i) + PATH) * g.row
      const ends = [timeline.start[i], timeline.end[i]].map((t) => Math.min(g.right, Math.max(g.left, g.x(t))))
      if (timeline.end[i] < g.from || timeline.start[i] > g.to) {
        last = null
        continue
      }
      if (last === null) ctx.moveTo(ends[0], y)
      else ctx.lineTo(ends[0], y)
      ctx.lineTo(ends[1], y)
      last = i
    }
    ctx.stroke()
  }

  function drawNames(ctx, timeline, g, theme) {
    const { memory } = timeline
    ctx.textAlign = "left"
    ctx.textBaseline = "middle"
    for (let rank = 0; rank < g.P; rank++) {
      ctx.fillStyle = theme.ink
      ctx.font = `12px ${FONT}`
      ctx.fillText(g.left < 60 ? `r${rank}` : `rank ${rank}`, 4, (rank + (UNITS_TOP + UNITS_BOTTOM) / 2) * g.row)
      if (memory === null || g.row < 26) continue
      ctx.fillStyle = theme.faint
      ctx.font = `${g.left < 60 ? 9 : 10}px ${FONT}`
      const most = amountText(memory, memory.total[rank], 3).replace(/ micro-batch(es)?/, "")
      const text = g.left < 60 ? most.replace(/ (units|(.)iB)/, "$2") : `peak ${most}`
      ctx.fillText(text, 4, (rank + (MEMORY_TOP + MEMORY_BOTTOM) / 2) * g.row)
    }
  }

  // -- one timeline -------------------------------------------------------------------------------------------------

  class Picture {
    constructor(timeline, style, colors) {
      Object.assign(this, { timeline, style, colors })
      const { first, stage } = timeline
      this.P = first.length - 1
      this.firstStage = Array.from({ length: this.P }, (_, rank) => {
        let least = Infinity
        for (let i = first[rank]; i < first[rank + 1]; i++) least = Math.min(least, stage[i])
        return least
      })
      this.namesStage = this.firstStage.some((s, rank) => s !== rank) || this.hasLater()
      this.begin = Infinity
      this.end = -Infinity
      timeline.start.forEach((x) => (this.begin = Math.min(this.begin, x)))
      timeline.end.forEach((x) => (this.end = Math.max(this.end, x)))
      this.critical = timeline.path === null ? null : new Set(timeline.path)
      this.widths = {} // by the size of letters: that of a digit, and what a dot takes less
      this.shortest = Infinity
      this.forms = this.formsOfNames()
      for (let i = 0; i < stage.length; i++) {
        const seconds = timeline.end[i] - timeline.start[i]
        if (seconds > 0) this.shortest = Math.min(this.shortest, seconds)
      }
    }

    // How a unit's name is drawn: as an order's text has it, or shorter where units lack the room for that.
    formsOfNames() {
      const { stage, microbatch, segment } = this.timeline
      const most = (numbers) => numbers.reduce((a, b) => Math.max(a, b), 0)
      const letters = (numbers) => String(most(numbers)).length
      const number = (i) => `${microbatch[i]}.${segment[i]}`
      const longest = letters(microbatch) + 1 + letters(segment)
      const forms = [
        { write: (i) => this.letter(i) + number(i), longest: longest + 1, dots: 1 },
        { write: number, longest, dots: 1 },
      ]
      if (this.namesStage) forms.unshift({ write: (i) => this.name(i), longest: longest + 3 + letters(stage), dots: 1 })
      const whole = { write: (i) => String(microbatch[i]), longest: letters(microbatch), dots: 0 }
      if (most(segment) === 0) forms.push(whole)
      return forms
    }

    hasLater() {
      return this.timeline.stage.some((s, i) => s !== this.firstStage[this.rankOf(i)])
    }

    rankOf(i) {
      const { first } = this.timeline
      let [low, high] = [0, this.P]
      while (high - low > 1) {
        const middle = (low + high) >> 1
        if (first[middle] <= i) low = middle
        else high = middle
      }
      return low
    }

    heading() {
      const { heading, makespan, bubble } = this.timeline
      const [second, name] = unitOfTime(makespan)
      const share = bubble === null ? "" : `, bubble ${(100 * bubble).toFixed(1)}%`
      const text = `${digits(makespan / second, 4)} ${name}${share}`
      return heading ? `${heading}: ${text}` : text
    }

    draw(ctx, g, theme, most, showsPath) {
      const { timeline, style } = this
      drawGrid(ctx, g, theme, this.P)
      for (let rank = 0; rank < this.P; rank++) {
        if (timeline.first[rank] === timeline.first[rank + 1]) continue
        drawUnits(ctx, this, g, rank, theme)
        if (timeline.memory !== null) drawMemory(ctx, timeline, g, rank, style.holdings, most)
      }
      if (showsPath && timeline.path !== null) drawPath(ctx, timeline, g, (i) => this.rankOf(i), theme)
      drawNames(ctx, timeline, g, theme)
    }

    // The number of the unit at a moment of a rank, -1 if there is none within `near` seconds.
    unitAt(rank, moment, near) {
      const { first, start, end } = this.timeline
      let best = -1
      let least = near
      for (let i = Math.max(first[rank], firstAfter(this.timeline, rank, moment) - 2); i < first[rank + 1]; i++) {
        if (start[i] > moment + near) break
        if (start[i] <= moment && moment < end[i]) return i
        const away = Math.min(Math.abs(start[i] - moment), Math.abs(end[i] - moment))
        if (away <= least) [best, least] = [i, away]
      }
      return best
    }

    letter(i) {
      return this.style.passes[this.timeline.pass[i]].letter
    }

    name(i) {
      const { stage, microbatch, segment } = this.timeline
      return `${this.namesStage ? `[${stage[i]}]` : ""}${this.letter(i)}${microbatch[i]}.${segment[i]}`
    }

    // What is told of a unit: pairs of a label and a text.
    tellUnit(i) {
      const { timeline } = this
      const { start, end, inputs } = timeline
      const [second, unit] = unitOfTime(this.end - this.begin)
      const time = (x) => `${digits(x / second, 6)} ${unit}`
      const at = (x) => time(x - this.begin)
      const one = (j, told) => `${this.name(j)} on rank ${this.rankOf(j)}, ${told}`
      const list = (js, tell) => js.map((j) => one(j, tell(j))).join("; ") || "nothing"
      const earlier = Array.from(inputs.units.subarray(inputs.first[i], inputs.first[i + 1]))
      const later = []
      for (let j = 0; j < timeline.pass.length; j++)
        for (let e = inputs.first[j]; e < inputs.first[j + 1]; e++) if (inputs.units[e] === i) later.push(j)
      const told = [
        ["unit", `${this.name(i)}, ${this.style.passes[timeline.pass[i]].text}`],
        ["rank", `${this.rankOf(i)}, stage ${timeline.stage[i]}`],
        ["time", `${at(start[i])} to ${at(end[i])}, ${time(end[i] - start[i])} long`],
        ["after", list(earlier.sort((a, b) => end[b] - end[a]), (j) => `ended at ${at(end[j])}`)],
        ["before", list(later.sort((a, b) => start[a] - start[b]), (j) => `from ${at(start[j])}`)],
      ]
      if (timeline.slack === null) return told
      const slack = this.critical.has(i) ? "on the critical path" : `may take ${time(timeline.slack[i])} longer`
      return [...told, ["slack", slack]]
    }

    // The same of what a rank holds at a moment; `height`: bytes from the bottom of its curve. Null: nothing there.
    tellMemory(rank, moment, height) {
      const { memory } = this.timeline
      let found = null
      walkMemory(this.timeline, rank, this.style.holdings, (when, held) => {
        if (when <= moment) found = Array.from(held)
      })
      if (found === null) return null
      let below = 0
      const h = found.findIndex((x) => (below += x) >= height && x > 0)
      const all = found.reduce((a, b) => a + b, 0)
      const amount = (x) => amountText(memory, x)
      if (memory.kind !== "bytes")
        return [["rank", `${rank}`], ["live", `${amount(all)} of at most ${amount(memory.total[rank])}`]]
      const told = [["rank", `${rank}`], ["holds", `${amount(all)} of at most ${amount(memory.total[rank])}`]]
      if (h >= 0) {
        told.push(["here", `${this.style.holdings[h].text}: ${amount(found[h])}`])
        told.push(["with all below", `${amount(below)} of at most ${amount(memory.total[rank])}`])
      }
      return told
    }
  }

  const ROWS = { UNITS_TOP, UNITS_BOTTOM, PATH, MEMORY_TOP, MEMORY_BOTTOM }
  return { Picture, palette, layout, firstAfter, FONT, LIGHT, ROWS }
})()
