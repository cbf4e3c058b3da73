// saved.js - timelines as they stand, on white: as SVG text, and on a canvas for PNG.
"use strict"

// SVG through the calls of a canvas.
class SvgContext {
  constructor(width, height) {
    Object.assign(this, { width, height, parts: [], path: "", fillStyle: "", strokeStyle: "", lineWidth: 1 })
    Object.assign(this, { font: "", textAlign: "left", textBaseline: "alphabetic", groups: 0 })
  }

  // Moves all that comes.
  translate(x, y) {
    this.groups++
    this.parts.push(`<g transform="translate(${x} ${y})">`)
  }

  static number(x) {
    return String(Math.round(100 * x) / 100)
  }

  fillRect(x, y, width, height) {
    const n = SvgContext.number
    const box = `x="${n(x)}" y="${n(y)}" width="${n(width)}" height="${n(height)}"`
    this.parts.push(`<rect ${box} fill="${this.fillStyle}"/>`)
  }

  beginPath() {
    this.path = ""
  }

  moveTo(x, y) {
    this.path += `M${SvgContext.number(x)} ${SvgContext.number(y)}`
  }

  lineTo(x, y) {
    this.path += `L${SvgContext.number(x)} ${SvgContext.number(y)}`
  }

  closePath() {
    this.path += "Z"
  }

  fill() {
    this.parts.push(`<path d="${this.path}" fill="${this.fillStyle}"/>`)
  }

  stroke() {
    const pen = `stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}"`
    this.parts.push(`<path d="${this.path}" fill="none" ${pen}/>`)
  }

  measureText(text) {
    return { width: 0.58 * parseFloat(this.font) * text.length }
  }

  fillText(text, x, y) {
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign]
    const base = { middle: "central", top: "hanging" }[this.textBaseline] ?? "auto"
    const n = SvgContext.number
    const safe = text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c])
    this.parts.push(
      `<text x="${n(x)}" y="${n(y)}" font-size="${parseFloat(this.font)}" fill="${this.fillStyle}" ` +
        `text-anchor="${anchor}" dominant-baseline="${base}">${safe}</text>`,
    )
  }

  toString() {
    const size = `width="${this.width}" height="${this.height}" viewBox="0 0 ${this.width} ${this.height}"`
    const parts = [...this.parts, ...Array(this.groups).fill("</g>")].join("\n")
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="${Pictures.FONT}">\n${parts}\n</svg>\n`
  }
}

Object.assign(Timelines.prototype, {
  // One timeline below its heading. make: the context for a picture of this width and height.
  draft(index, width, make) {
    const { layout, FONT, LIGHT } = Pictures
    const head = 24
    const picture = this.pictures[index]
    const g = layout(picture, width, 56, [this.from, this.to])
    const ctx = make(g.width, g.height + head)
    ctx.fillStyle = LIGHT.ground
    ctx.fillRect(0, 0, g.width, head)
    ctx.fillStyle = LIGHT.ink
    ctx.font = `14px ${FONT}`
    ctx.textBaseline = "middle"
    ctx.fillText(picture.heading(), 4, head / 2)
    ctx.translate(0, head)
    picture.draw(ctx, g, LIGHT, picture.timeline.memory === null ? 1 : this.most(picture), this.pathBox.checked)
    return ctx
  },

  svg(index, width = 1200) {
    return this.draft(index, width, (w, h) => new SvgContext(w, h)).toString()
  },

  canvas(index, width = 1200, sharpness = 2) {
    const canvas = document.createElement("canvas")
    this.draft(index, width, (w, h) => {
      Object.assign(canvas, { width: w * sharpness, height: h * sharpness })
      const ctx = canvas.getContext("2d")
      ctx.scale(sharpness, sharpness)
      return ctx
    })
    return canvas
  },
})
