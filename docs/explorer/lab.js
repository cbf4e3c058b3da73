// lab.js - one design in, its order, times and memory out. All numbers come from the C core, as WebAssembly; here they
// are only moved in and out of its memory.
"use strict"

const Laboratory = (() => {
  const TOKENS = 65536 // of a sequence without a length of its own, where it is cut by seconds
  const MOST_UNITS = 200_000 // of a design that this page takes
  const sum = (values) => values.reduce((a, b) => a + b, 0)

  class Laboratory {
    static async open(bytes, facts) {
      const refuse = () => 8 // EBADF: the C library could write to a file, and there is none
      const files = { fd_close: refuse, fd_seek: refuse, fd_write: refuse }
      const { instance } = await WebAssembly.instantiate(bytes, { wasi_snapshot_preview1: files })
      instance.exports._initialize()
      return new Laboratory(instance.exports, facts)
    }

    constructor(c, facts) {
      Object.assign(this, { c, facts })
    }

    // -- the core's memory ------------------------------------------------------------------------------------------

    text(at) {
      const bytes = new Uint8Array(this.c.memory.buffer, at)
      return at === 0 ? null : new TextDecoder().decode(bytes.subarray(0, bytes.indexOf(0)))
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

    // All that the core has told, by name.
    told() {
      const found = {}
      const view = new Int32Array(this.c.memory.buffer) // of an array: its name, values, count, and room for more
      for (let at = this.c.arrays() / 4; view[at] !== 0; at += 4)
        found[this.text(view[at])] = new Float64Array(this.c.memory.buffer, view[at + 1], view[at + 2]).slice()
      return found
    }

    // The words that an option may be; none: it is a number.
    wordsOf(option) {
      const i = this.facts.options.indexOf(option)
      return [1, 2].map((word) => this.text(this.c.option_word(i, word))).filter((word) => word !== null)
    }

    // -- a design ---------------------------------------------------------------------------------------------------

    // What a design gives; `refused` in place of times where the core refuses it.
    compute(design) {
      const result = { refused: null }
      try {
        this.c.reset()
        this.run(design, result)
      } catch (error) {
        const isTooLarge = error instanceof RangeError || error instanceof WebAssembly.RuntimeError
        result.refused = isTooLarge ? "the design is too large for the memory of this page" : error.message
      }
      return result
    }

    run(design, result) {
      const { c } = this
      const isText = design.family === "text"
      if (isText) {
        this.checkSize(design.order.length / 5) // of "F0.0 "
        this.must(c.read_text(this.string(design.order)))
      }
      let shape = isText ? this.readShape() : this.shapeOf(design)
      const tables = this.tables(design, shape)
      this.giveTables(tables, shape)
      if (!isText) {
        this.build(design, shape)
        shape = this.readShape()
      }
      const [RECOMPUTED, MOVED] = [1, 2] // kinds of cells of unit.h
      if (design.recompute === "all") this.must(c.change(RECOMPUTED, 0))
      if (design.offload === "all") this.must(c.change(MOVED, 0))
      const moves = design.offload !== "none"
      const tier = moves && tables.tier.some((x) => x > 0) ? this.doubles(tables.tier) : 0
      c.set_links(this.doubles(tables.latency), tier)
      c.set_bytes(this.facts.holdings.indexOf("kept_activations"), this.wholes(tables.bytes))
      if (design.recompute === "fit" || design.offload === "fit") this.fit(design, tables, shape)
      this.must(c.run())
      this.read(result, shape, tables)
    }

    checkSize(units) {
      if (units > MOST_UNITS)
        throw new Error(`a design of ${units} units, more than the ${MOST_UNITS} that this page takes`)
    }

    // -- the order --------------------------------------------------------------------------------------------------

    // Counts of a design. trees: parents [micro-batch][segment]; null: k segments in a chain in each.
    shapeOf({ family, P, M, k, v, parents }) {
      for (const [name, count] of Object.entries({ P, M, k, v }))
        if (!Number.isInteger(count)) throw new Error(`${name} is ${count}, must be a whole number`)
      if (Math.min(P, M, k, v) < 1) this.must(this.c.build(this.string(family), P, M, k, v))
      this.checkSize(2 * P * M * k * v)
      const trees = this.readTrees(parents, M, k)
      if (trees !== null) this.checkSize(2 * P * v * sum(trees.map((own) => own.length)))
      return { P, S: P * v, M, k: trees ? Math.max(...trees.map((own) => own.length)) : k, trees }
    }

    // The parents of a design from a word for each micro-batch, or one for all: "-1,0,0", or "-" for a chain of k
    // segments; null where it gives none.
    readTrees(parents, M, k) {
      const words = parents.trim().split(/\s+/).filter((word) => word !== "")
      if (words.length === 0) return null
      if (words.length !== 1 && words.length !== M)
        throw new Error(`parents hold ${words.length} words, must hold one for all or for each of ${M}`)
      const wrong = words.find((word) => !/^(-|-?\d{1,9}(,-?\d{1,9})*)$/.test(word))
      if (wrong !== undefined)
        throw new Error(`"${wrong}": parents are written -1,0,0, or - for a chain, with blanks between`)
      const chain = Array.from({ length: k }, (_, s) => s - 1)
      const tree = (word) => (word === "-" ? chain : word.split(",").map(Number))
      return Array.from({ length: M }, (_, m) => tree(words[words.length === 1 ? 0 : m]))
    }

    // The same of an order that there is, and where its stages lie.
    readShape() {
      this.c.tell_shape()
      const { counts: [P, S, M, k, columns], segments_of, parents, rank_of_stage } = this.told()
      const all = Array.from(parents)
      const own = (count) => (all.length ? all.splice(0, count) : Array.from({ length: count }, (_, s) => s - 1))
      return { P, S, M, k, trees: columns ? Array.from(segments_of, own) : null, ranks: Array.from(rank_of_stage) }
    }

    build(design, { P, M, k, trees }) {
      const { c } = this
      const family = this.facts.families.find((one) => one.name === design.family)
      if (trees) {
        const segmentsOf = trees.map((own) => own.length)
        c.set_rows(this.give(Int32Array, segmentsOf), this.give(Int32Array, trees.flat()))
      }
      const given = { ...design.options, costs: 1, transfer: design.message }
      for (const name of (family?.options ?? []).filter((option) => given[option] !== undefined)) {
        const value = given[name]
        c.set_option(this.facts.options.indexOf(name), Number(value) || this.wordsOf(name).indexOf(value) + 1)
      }
      this.must(c.build(this.string(design.family), P, M, k, design.v))
    }

    // -- seconds and bytes ------------------------------------------------------------------------------------------

    // What segments take of a micro-batch's seconds, a part of `all`: by their tokens, and by their attention to the
    // tokens before them on their path. Segments are alike, or have these lengths.
    shares(parents, sizes, attention) {
      const tokens = sum(sizes)
      if (attention === 0) return { of: sizes, all: tokens }
      const ends = []
      const pairs = parents.map((parent, s) => {
        const begin = ends[parent] ?? 0
        ends[s] = begin + sizes[s]
        return ends[s] ** 2 - begin ** 2
      })
      const share = (size, s) => ((1 - attention) * size) / tokens + (attention * pairs[s]) / sum(pairs)
      return { of: sizes.map(share), all: 1 }
    }

    // Tables of a design, in which a rank's share of a micro-batch is known.
    tables(design, { P, S, k, trees }) {
      const { attention } = design
      const isShare = attention >= 0 && attention <= 1
      if (!isShare) throw new Error(`the share of attention is ${attention}, must be in 0..1`)
      // The share t of the tokens that takes the share x of the seconds: (1 - attention) t + attention t^2 = x.
      const tokensTo = (x) => (2 * x) / (1 - attention + Math.sqrt((1 - attention) ** 2 + 4 * attention * x))
      const endOf = (s) => (design.split === "equal" ? Math.round(TOKENS * tokensTo(s / k)) || 0 : s)
      const rows = trees ?? [Array.from({ length: k }, (_, s) => s - 1)]
      const sizesOf = (own) => own.map((_, s) => (trees ? 1 : endOf(s + 1) - endOf(s)))
      const table = (seconds, attention) => {
        const row = rows.flatMap((own) => {
          const { of, all } = this.shares(own, sizesOf(own), attention)
          return of.map((share) => (seconds * share) / ((all * S) / P))
        })
        return Array(S).fill(row).flat()
      }
      const passes = { F: table(design.F, attention), B: table(design.B, attention) }
      if (design.W !== null) passes.W = table(design.W, attention)
      return {
        passes, tier: table(design.tier, 0), latency: Array(S - 1).fill(design.message),
        bytes: Array(S).fill(rows.flatMap(sizesOf)).flat(),
        whole: ((trees ? k : endOf(k)) * S) / P, // bytes of a micro-batch
      }
    }

    giveTables({ passes }, { S, k, trees }) {
      const count = S * (trees ? trees.flat().length : k)
      const all = { ...passes, S: Array(count).fill(0.25), T: Array(count).fill(0.5) } // as Costs() has them
      this.facts.style.passes.forEach(({ letter }, pass) => {
        if (letter in all) this.c.set_pass(pass, this.doubles(all[letter]))
      })
      this.must(this.c.fill_in(count))
    }

    fit(design, { whole }, { P }) {
      const room = Array(P).fill(Math.max(0, Math.floor(design.cap * whole)))
      this.must(this.c.fit(this.wholes(room), design.recompute === "fit", design.offload === "fit"))
    }

    // -- results: the order as text, and a timeline as timeline.js says -----------------------------------------------

    read(result, shape, { whole, ...tables }) {
      const { makespan, first_input, inputs, total, first_change, when, by, holding, ...told } = this.told()
      const names = this.facts.style.holdings.map(({ name }) => name)
      Object.assign(result, told, shape, {
        text: this.text(this.c.text()),
        makespan: makespan[0],
        bubble: makespan[0] > 0 ? 1 - sum(told.busy) / (makespan[0] * shape.P) : 0,
        slack: told.path.length ? told.slack : null,
        path: told.path.length ? told.path : null,
        inputs: { first: first_input, units: inputs },
        tables,
        memory: {
          whole, constant: {}, total: Array.from(total),
          first: first_change, when, by, holding: holding.map((h) => names.indexOf(this.facts.holdings[h])),
        },
      })
    }
  }

  return Laboratory
})()
