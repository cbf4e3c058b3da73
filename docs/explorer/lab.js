// lab.js - one design in, its order, times and memory out. All numbers come from the C core, as WebAssembly; here they
// are only moved in and out of its memory.
"use strict"

const Laboratory = (() => {
  const TOKENS = 65536 // of a sequence without a length of its own, where it is cut by seconds
  const MOST_UNITS = 200_000 // of a design that this page takes
  const [RECOMPUTED, MOVED] = [1, 2] // kinds of cells of unit.h
  const sum = (values) => values.reduce((a, b) => a + b, 0)

  // The core with one design: an instance, and the lists that it tells.
  class Core {
    constructor(module) {
      const names = {} // by their places in memory
      const tell = (name, value) => (this.lists[(names[name] ??= this.text(name))] ??= []).push(value)
      const refuse = () => 8 // EBADF: the C library could write to a file, and there is none
      const files = { fd_close: refuse, fd_seek: refuse, fd_write: refuse }
      this.lists = { inputs: [], slack: [], path: [] } // which may stay empty
      this.c = new WebAssembly.Instance(module, { explorer: { tell }, wasi_snapshot_preview1: files }).exports
      this.c._initialize()
    }

    text(at) {
      const bytes = new Uint8Array(this.c.memory.buffer, at)
      return new TextDecoder().decode(bytes.subarray(0, bytes.indexOf(0)))
    }

    // Refuses with the core's message if a call has failed.
    must(status) {
      if (status !== 0) throw new Error(this.text(this.c.last_error()))
    }

    give(Kind, values) {
      const at = this.c.take(Kind.BYTES_PER_ELEMENT * values.length)
      new Kind(this.c.memory.buffer, at, values.length).set(values)
      return at
    }

    doubles(values) {
      return this.give(Float64Array, values)
    }

    wholes(values) {
      return this.give(BigInt64Array, Array.from(values, (x) => BigInt(Math.trunc(x))))
    }

    string(text) {
      return this.give(Uint8Array, new TextEncoder().encode(`${text}\0`))
    }
  }

  class Laboratory {
    static async open(bytes, facts) {
      return new Laboratory(await WebAssembly.compile(bytes), facts)
    }

    constructor(module, facts) {
      Object.assign(this, { module, facts })
    }

    // What a design gives; `refused` in place of times where the core refuses it.
    compute(design) {
      try {
        return { refused: null, ...this.run(new Core(this.module), design) }
      } catch (error) {
        const isTooLarge = error instanceof RangeError || error instanceof WebAssembly.RuntimeError
        return { refused: isTooLarge ? "the design is too large for the memory of this page" : error.message }
      }
    }

    run(core, design) {
      const { c } = core
      const isText = design.family === "text"
      if (isText) {
        this.checkSize(design.order.length / 5) // of "F0.0 "
        core.must(c.read_text(core.string(design.order)))
      }
      const [P, S, M, k] = isText ? core.lists.counts : this.countsOf(core, design)
      const tables = this.tables(design, P, S, k)
      this.giveTables(core, tables, S * k, design.offload !== "none")
      if (!isText) this.build(core, design)
      if (design.recompute === "all") core.must(c.change(RECOMPUTED, 0))
      if (design.offload === "all") core.must(c.change(MOVED, 0))
      if (design.recompute === "fit" || design.offload === "fit") {
        const room = Array(P).fill(Math.max(0, Math.floor(design.cap * tables.whole)))
        core.must(c.fit(core.wholes(room), design.recompute === "fit", design.offload === "fit"))
      }
      core.must(c.run())
      return { ...this.told(core.lists, tables.whole, P), P, M, k, text: core.text(c.text()) }
    }

    checkSize(units) {
      if (units > MOST_UNITS)
        throw new Error(`a design of ${units} units, more than the ${MOST_UNITS} that this page takes`)
    }

    // -- the order --------------------------------------------------------------------------------------------------

    countsOf(core, { family, P, M, k, v }) {
      for (const [name, count] of Object.entries({ P, M, k, v }))
        if (!Number.isInteger(count)) throw new Error(`${name} is ${count}, must be a whole number`)
      if (Math.min(P, M, k, v) < 1) core.must(core.c.build(core.string(family), P, M, k, v))
      this.checkSize(2 * P * M * k * v)
      return [P, P * v, M, k]
    }

    build(core, { family, P, M, k, v, options, message }) {
      const taken = this.facts.families.find(({ name }) => name === family)?.options ?? []
      const given = { ...options, costs: 1, transfer: message }
      this.facts.options.forEach(({ name, words }, i) => {
        if (!taken.includes(name) || given[name] === undefined) return
        core.c.set_option(i, Number(given[name]) || words.indexOf(given[name]) + 1)
      })
      core.must(core.c.build(core.string(family), P, M, k, v))
    }

    // -- seconds and bytes ------------------------------------------------------------------------------------------

    // Tables [stage][segment] of a design, in which a rank's share of a micro-batch is known.
    tables(design, P, S, k) {
      const { attention, message } = design
      const isShare = attention >= 0 && attention <= 1
      if (!isShare) throw new Error(`the share of attention is ${attention}, must be in 0..1`)
      // The share t of the tokens that takes the share x of the seconds: (1 - attention) t + attention t^2 = x.
      const tokensTo = (x) => (2 * x) / (1 - attention + Math.sqrt((1 - attention) ** 2 + 4 * attention * x))
      const endOf = (s) => (design.split === "equal" ? Math.round(TOKENS * tokensTo(s / k)) || 0 : s)
      const sizes = Array.from({ length: k }, (_, s) => endOf(s + 1) - endOf(s))
      const all = sum(sizes)
      const share = (size, s) => {
        const pairs = endOf(s + 1) ** 2 - endOf(s) ** 2 // of a token and one that it attends to
        return ((1 - attention) * size) / all + (attention * pairs) / all ** 2
      }
      const [shares, whole] = attention === 0 ? [sizes, all] : [sizes.map(share), 1]
      const ofStages = (row) => Array(S).fill(row).flat()
      const table = (seconds, parts, whole) => ofStages(parts.map((part) => (seconds * part) / ((whole * S) / P)))
      const passes = { F: table(design.F, shares, whole), B: table(design.B, shares, whole) }
      if (design.W !== null) passes.W = table(design.W, shares, whole)
      return {
        passes, tier: table(design.tier, sizes, all), latency: Array(S - 1).fill(message),
        bytes: ofStages(sizes), whole: (all * S) / P, // bytes of a micro-batch
      }
    }

    giveTables(core, { passes, latency, tier, bytes }, count, moves) {
      const all = { ...passes, S: Array(count).fill(0.25), T: Array(count).fill(0.5) } // as Costs() has them
      const letters = this.facts.style.passes.map(({ letter }) => letter)
      const seconds = letters.flatMap((letter) => all[letter] ?? Array(count).fill(0))
      const given = sum(letters.map((letter, pass) => (letter in all ? 2 ** pass : 0)))
      const places = [core.doubles(latency), moves ? core.doubles(tier) : 0, core.wholes(bytes)]
      core.must(core.c.set_tables(core.doubles(seconds), given, count, ...places))
    }

    // -- results: a timeline as timeline.js says ----------------------------------------------------------------------

    told(lists, whole, P) {
      const { makespan: [makespan], first_input, first_change, inputs, total, when, by, slack, path, ...others } = lists
      const held = this.facts.style.holdings.findIndex(({ name }) => name === "activations")
      return {
        ...others, makespan,
        bubble: makespan > 0 ? 1 - sum(others.busy) / (makespan * P) : 0,
        slack: path.length ? slack : null,
        path: path.length ? path : null,
        inputs: { first: first_input, units: inputs },
        memory: { whole, constant: {}, total, first: first_change, when, by, holding: when.map(() => held) },
      }
    }
  }

  return Laboratory
})()
