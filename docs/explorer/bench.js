// bench.js - computes designs in the laboratory, lab.js, in a worker where there are any. The newest design is the one
// that is waited for.
"use strict"

const Bench = (() => {
  const PATIENCE = 400 // milliseconds that a computation may take before a newer design ends it
  const facts = JSON.parse(document.getElementById("facts").textContent)
  const byId = (id) => document.getElementById(id)
  const wasm = Uint8Array.from(atob(byId("wasm").textContent), (c) => c.charCodeAt(0))
  const script = URL.createObjectURL(new Blob([byId("laboratory").textContent], { type: "text/javascript" }))

  class Bench {
    constructor() {
      this.number = 0
      this.open()
    }

    open() {
      try {
        this.worker = new Worker(script)
        this.worker.onmessage = ({ data }) => this.finish(data)
        this.worker.onerror = ({ message }) => this.fail(message)
        this.worker.postMessage({ wasm, facts })
      } catch {
        this.worker = null
        this.inline ??= Laboratory.open(wasm, facts)
      }
      this.running = null
    }

    // What a design gives; null where a newer one was asked for meanwhile.
    compute(design) {
      this.waiting?.resolve(null)
      return new Promise((resolve) => {
        this.waiting = { design: structuredClone(design), resolve }
        if (this.running === null) this.next()
        else this.hurry()
      })
    }

    fail(text) {
      this.finish({ number: this.number, result: { refused: { text, where: "page" } } })
    }

    // Ends a computation that has had its time, where another one waits.
    hurry() {
      if (this.worker === null || !this.waiting || !this.running) return
      const left = this.running.began + PATIENCE - performance.now()
      if (left > 0) {
        setTimeout(() => this.hurry(), left)
        return
      }
      this.worker.terminate()
      this.running.resolve(null)
      this.open()
      this.next()
    }

    next() {
      const { design, resolve } = this.waiting
      this.waiting = null
      const number = ++this.number
      this.running = { number, began: performance.now(), resolve }
      if (this.worker !== null) this.worker.postMessage({ number, design })
      else this.inline.then((laboratory) => this.finish({ number, result: laboratory.compute(design) }))
    }

    finish({ number, result }) {
      if (this.running === null || number !== this.running.number) return
      this.running.resolve(result)
      this.running = null
      if (this.waiting) this.next()
    }
  }

  return Bench
})()
