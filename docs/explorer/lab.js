// lab.js - one design in, its order, times and memory out. All numbers come from the C core, as WebAssembly; here they
// are only moved in and out of its memory. Runs in a worker, or in the page where there are none.
"use strict"

const Laboratory = (() => {
  // Numbers of the passes, as csrc/core/unit.h has them.
  const PASS = { F: 0, B: 1, I: 2, W: 3, R: 4, S: 5, T: 6, E: 7, G: 8, O: 9, A: 10, L: 11 }
  const EVEN_PIECES = 65536 // tokens of a sequence without a length of its own, where they are cut by seconds
  const GIB = 2 ** 30
  const MOST_UNITS = 1_000_000 // of a design that this page takes

  class Refused extends Error {
    constructor(text, where) {
      super(text)
      this.where = where // "counts", "costs", "order", "text"
    }
  }

  class Core {
    constructor(exports) {
      this.c = exports
      this.decoder = new TextDecoder()
      this.encoder = new TextEncoder()
    }

    text(at) {
      if (at === 0) return null
      const bytes = new Uint8Array(this.c.memory.buffer, at)
      return this.decoder.decode(bytes.subarray(0, bytes.indexOf(0)))
    }

    // The status of a call; refuses with its message.
    must(status, where) {
      if (status !== 0) throw new Refused(this.text(this.c.last_error()), where)
    }

    room(bytes) {
      const at = this.c.take(bytes)
      if (at === 0) throw new Refused("no memory left for this design", "counts")
      return at
    }

    write(text) {
      const bytes = this.encoder.encode(text)
      const at = this.room(bytes.length + 1)
      new Uint8Array(this.c.memory.buffer).set(bytes, at)
      return at
    }

    doubles(values) {
      const at = this.room(8 * values.length)
      new Float64Array(this.c.memory.buffer, at, values.length).set(values)
      return at
    }

    wholes(values) {
      const at = this.room(8 * values.length)
      new BigInt64Array(this.c.memory.buffer, at, values.length).set(Array.from(values, (x) => BigInt(Math.trunc(x))))
      return at
    }

    ints(values) {
      const at = this.room(4 * values.length)
      new Int32Array(this.c.memory.buffer, at, values.length).set(values)
      return at
    }

    readDoubles(at, count) {
      return new Float64Array(this.c.memory.buffer, at, count).slice()
    }

    readWholes(at, count) {
      return Float64Array.from(new BigInt64Array(this.c.memory.buffer, at, count), Number)
    }

    readInts(at, count) {
      return new Int32Array(this.c.memory.buffer, at, count).slice()
    }
  }

  // A table [stage][segment] of a preset: its different rows, and the row of each stage.
  const flat = (table) => Float64Array.from(table.of.flatMap((row) => table.rows[row]))

  class Laboratory {
    static async open(bytes, facts) {
      const refuse = () => 8 // EBADF: the C library could write to a file, and there is none
      const files = { fd_close: refuse, fd_seek: refuse, fd_write: refuse }
      const { instance } = await WebAssembly.instantiate(bytes, { wasi_snapshot_preview1: files })
      instance.exports._initialize()
      return new Laboratory(instance.exports, facts)
    }

    constructor(exports, facts) {
      this.core = new Core(exports)
      this.facts = facts
    }

    // What a design gives; `refused` in place of times where the core refuses it.
    compute(design) {
      const began = performance.now()
      const result = { refused: null }
      try {
        this.core.c.reset()
        this.run(design, result)
      } catch (error) {
        const isTooLarge = error instanceof RangeError || error instanceof WebAssembly.RuntimeError
        const text = isTooLarge ? "the design is too large for the memory of this page" : error.message
        result.refused = { text, where: error instanceof Refused ? error.where : "page" }
      }
      result.milliseconds = performance.now() - began
      return result
    }

    run(design, result) {
      const { c } = this.core
      if (design.family !== "text") this.checkCounts(design)
      const trees = this.readTrees(design)
      const costs = this.costs(design)
      this.built = null // seconds of F, I and W that the order is built from
      if (design.family === "text") {
        this.checkSize(Math.ceil(design.order.length / 5)) // of "F0.0 "
        this.core.must(c.read_text(this.core.write(design.order)), "text")
      } else {
        this.build(design, costs, trees)
      }
      if (design.weights === "fill" && this.readCounts().passes & (1 << PASS.B)) {
        this.core.must(c.check(), "order")
        this.core.must(c.defer_weights(), "order")
        result.deferred = true
      }
      const counts = this.readCounts()
      Object.assign(result, counts)
      if (c.check() !== 0) {
        result.text = this.core.text(c.text())
        this.core.must(c.check(), "order")
      }
      if (design.recompute === "all") this.core.must(c.recompute(0), "order")
      if (design.offload === "all") this.core.must(c.offload(0), "order")
      const tables = this.tablesOf(design, costs, counts)
      this.giveTables(design, tables, counts)
      this.core.must(c.lower(), "order")
      if (design.recompute === "fit" || design.offload === "fit") result.room = this.fit(design, tables, counts)
      Object.assign(result, this.readCounts())
      this.readOrder(result)
      this.readTimes(design, result)
      this.readMemory(tables, result)
    }

    checkSize(units) {
      if (units > MOST_UNITS)
        throw new Refused(`a design of ${units} units, more than the ${MOST_UNITS} that this page takes`, "counts")
    }

    // What the core cannot be asked, or would take too long here.
    checkCounts({ P, M, k, v }) {
      for (const [name, count] of Object.entries({ P, M, k, v }))
        if (!Number.isInteger(count)) throw new Refused(`${name} is ${count}, must be a whole number`, "counts")
      if (Math.min(P, M, k, v) > 0) this.checkSize(2 * P * M * k * v)
    }

    // The parents of a design, [micro-batch][segment], from a word for each micro-batch, or one for all: "-1,0,0", or
    // "-" for a chain of k segments; null where it gives none.
    readTrees({ family, M, k, parents }) {
      const words = family === "text" ? [] : (parents ?? "").trim().split(/\s+/).filter((word) => word !== "")
      if (words.length === 0) return null
      if (words.length !== 1 && words.length !== M)
        throw new Refused(`parents hold ${words.length} words, must hold one for all or for each of ${M}`, "counts")
      const wrong = words.find((word) => !/^(-|-?\d{1,9}(,-?\d{1,9})*)$/.test(word))
      if (wrong !== undefined)
        throw new Refused(`"${wrong}": parents are written -1,0,0, or - for a chain, with blanks between`, "counts")
      const chain = Array.from({ length: k }, (_, s) => s - 1)
      return Array.from({ length: M }, (_, m) => {
        const word = words[words.length === 1 ? 0 : m]
        return word === "-" ? chain : word.split(",").map(Number)
      })
    }

    // -- costs ------------------------------------------------------------------------------------------------------

    // Of every segment: what share of a stage's seconds it takes, and its tokens, those of all being `tokens`.
    split(design, k) {
      const { core } = this
      const lengths = /^[\d\s,]+$/.test(design.split) ? design.split.trim().split(/[\s,]+/).map(Number) : null
      if (lengths !== null && lengths.length !== k)
        throw new Refused(`the split holds ${lengths.length} lengths, there are ${k} segments`, "costs")
      if (design.split === "even" && design.attention === 0) return { shares: null, sizes: Array(k).fill(1), tokens: k }
      const tokens = lengths ? lengths.reduce((a, b) => a + b) : design.split === "even" ? k : EVEN_PIECES
      const sizes = lengths ? core.wholes(lengths) : core.room(8 * k)
      const isEqual = design.split === "equal" ? 1 : 0
      if (!lengths) core.must(core.c.split(tokens, k, design.attention, isEqual, sizes), "costs")
      const shares = core.room(8 * k)
      core.must(core.c.shares(tokens, k, design.attention, sizes, shares), "costs")
      return { shares: core.readDoubles(shares, k), sizes: Array.from(core.readWholes(sizes, k)), tokens }
    }

    // Seconds of the segments of a stage, one of `parts` / k per rank: of seconds that a rank takes for a micro-batch.
    segments(seconds, split, parts, k) {
      if (split.shares === null) return Array(k).fill(seconds / parts)
      return Array.from(split.shares, (share) => (seconds * share) / (parts / k))
    }

    // The same of a tree whose segments are of one length: attention is to the tokens of the path.
    treeSegments(seconds, { attention }, parts, parents) {
      const k = parents.length
      const keys = parents.map(() => 1)
      parents.forEach((parent, s) => parent >= 0 && (keys[s] = keys[parent] + 2)) // twice those of the middle token
      const all = keys.reduce((a, b) => a + b)
      return keys.map((own) => (seconds * ((1 - attention) / k + (attention * own) / all)) / (parts / k))
    }

    // Tables of a preset for these counts.
    preset(design, v, k) {
      const preset = this.facts.presets[design.costs]
      const found = preset.tables[`${v}/${k}/${design.split}`]
      if (found === undefined) {
        const have = `v = ${preset.v.join(", ")}, k = ${preset.k.join(", ")}, the split even or of equal time`
        throw new Refused(`${preset.title} has costs for ${have}`, "costs")
      }
      return found
    }

    // What is known of costs before there is an order.
    costs(design) {
      if (design.costs === "seconds") return null
      const preset = this.facts.presets[design.costs]
      if (design.family !== "text" && design.P !== preset.P)
        throw new Refused(`${preset.title} has costs for P = ${preset.P}`, "costs")
      return preset
    }

    build(design, preset, trees) {
      const { core } = this
      const { c } = core
      const family = this.facts.families.find((one) => one.name === design.family)
      const { P, M, v } = design
      const segmentsOf = trees === null ? Array(M).fill(design.k) : trees.map((own) => own.length)
      const k = Math.max(...segmentsOf)
      const columns = trees === null ? k : segmentsOf.reduce((a, b) => a + b)
      if (trees !== null) {
        this.checkSize(2 * P * columns * v)
        c.set_rows(core.ints(segmentsOf), core.ints(trees.flat()))
      }
      for (const [name, value] of Object.entries(design.options)) {
        if (!family.options.includes(name)) continue
        const i = this.facts.options.indexOf(name)
        const words = [1, 2].map((word) => core.text(c.option_word(i, word)))
        c.set_option(i, typeof value === "number" ? value : words.indexOf(value) + 1)
      }
      const name = core.write(design.family)
      if (family.options.includes("costs") && P * v * columns <= 1 << 22 && Math.min(P, v, k) > 0) {
        const tables = this.passTables(design, preset, P * v, v * k, segmentsOf, trees !== null, trees)
        for (const letter of ["F", "B", "W", "I"])
          if (tables[letter]) c.set_pass(PASS[letter], core.doubles(tables[letter]))
        core.must(c.fill_in_passes(P * v * columns), "costs")
        const built = ["F", "I", "W"].map((letter) => c.pass_seconds(PASS[letter]))
        c.set_option_costs(...built)
        this.built = built.map((at) => core.readDoubles(at, P * v * columns))
        if (family.options.includes("transfer") && preset === null)
          c.set_option(this.facts.options.indexOf("transfer"), design.message)
      }
      core.must(c.build(name, P, M, k, v), "counts")
    }

    // By letter, seconds of passes [stage][column]. parts: units of a pass that a rank runs for a micro-batch.
    passTables(design, preset, S, parts, segmentsOf, hasRows, trees) {
      if (preset !== null) {
        const table = this.preset(design, S / preset.P, segmentsOf[0])
        const tables = { F: flat(table.forward), B: flat(table.backward), I: flat(table.input) }
        Object.assign(tables, { W: flat(table.weight), R: flat(table.recompute) })
        if (design.offload !== "none") Object.assign(tables, { O: flat(table.move_out), L: flat(table.move_in) })
        return tables
      }
      const k = Math.max(...segmentsOf)
      const columns = (seconds) => {
        if (!hasRows) return this.segments(seconds, this.split(design, k), parts, k)
        const even = { ...design, split: "even" }
        if (trees !== null)
          return trees.flatMap((own) => this.treeSegments(seconds, design, (parts / k) * own.length, own))
        return segmentsOf.flatMap((each) => this.segments(seconds, this.split(even, each), (parts / k) * each, each))
      }
      const stages = (seconds) => {
        const row = columns(seconds)
        return Float64Array.from({ length: S * row.length }, (_, i) => row[i % row.length])
      }
      const tables = { F: stages(design.F), B: stages(design.B) }
      if (design.W !== null) tables.W = stages(design.W)
      return tables
    }

    // Parents of the order that is built, [micro-batch][segment]; null: chains.
    treesOf(segmentsOf) {
      const at = this.core.c.parents()
      if (at === 0) return null
      const all = Array.from(this.core.readInts(at, segmentsOf.reduce((a, b) => a + b)))
      return segmentsOf.map((count) => all.splice(0, count))
    }

    // All tables of an order that is built.
    tablesOf(design, preset, counts) {
      const { P, S, M, columns } = counts
      const { c } = this.core
      const segmentsOf = Array.from({ length: M }, (_, m) => c.segments_of(m))
      const hasRows = c.has_rows() !== 0
      const k = counts.k
      const parts = Math.max(1, Math.floor((k * S) / P))
      const trees = this.treesOf(segmentsOf)
      const passes = this.passTables(design, preset, S, parts, segmentsOf, hasRows, trees)
      if (preset !== null) {
        if (hasRows || P !== preset.P || S % P !== 0)
          throw new Refused(`${preset.title} has costs for P = ${preset.P}, and one k for all micro-batches`, "costs")
        const table = this.preset(design, S / P, k)
        const ranks = Array.from(this.core.readInts(c.rank_of_stage(), S))
        const place = preset.placements.find((one) => one.rank_of_stage.join() === ranks.join())
        if (place === undefined) throw new Refused(`${preset.title}: stages lie in a loop or a V`, "costs")
        const whole = flat(table.activations)
        const kept = flat(table.kept_activations)
        const bytes = {
          activations: whole.map((x, i) => x - kept[i]), kept_activations: kept,
          output_gradients: flat(table.output_gradients), kv: table.kv, kv_gradients: table.kv_gradients,
          staying: place.stays.flatMap((times) => table.message_bytes.map((x) => times * x)),
        }
        const constant = { weights: Array(P).fill(0), optimizer: Array(P).fill(0), logits: Array(P).fill(0) }
        ranks.forEach((rank, stage) => {
          constant.weights[rank] += table.weights[stage]
          constant.optimizer[rank] += table.optimizer[stage]
        })
        constant.logits[ranks[S - 1]] += table.logits
        return {
          passes, bytes, constant, tokens: null, sizes: table.sizes,
          tier: design.offload !== "none" ? flat(table.tier) : null,
          latency: place.latency, bandwidth: place.bandwidth, message: table.message_bytes,
        }
      }
      const split = hasRows ? null : this.split(design, k)
      const sizes = hasRows ? null : split.sizes
      const row = sizes ?? Array(columns).fill(1)
      const bytes = { kept_activations: Float64Array.from({ length: S * columns }, (_, i) => row[i % columns]) }
      let tier = null
      if (design.offload !== "none") {
        const even = { ...design, F: design.tier, B: 0, W: null, attention: 0 }
        tier = this.passTables(even, null, S, parts, segmentsOf, hasRows, trees).F
      }
      return {
        passes, bytes, constant: {}, tokens: ((hasRows ? k : split.tokens) * S) / P, sizes, tier,
        latency: Array(Math.max(S - 1, 0)).fill(design.message), bandwidth: null, message: null,
      }
    }

    giveTables(design, tables, counts) {
      const { core } = this
      const { c } = core
      for (const [letter, seconds] of Object.entries(tables.passes)) c.set_pass(PASS[letter], core.doubles(seconds))
      const has = (letter) => counts.passes & (1 << PASS[letter])
      for (const [letter, seconds] of [["S", 0.25], ["T", 0.5]]) // those of Costs()
        if (has(letter)) c.set_pass(PASS[letter], core.doubles(Array(counts.S * counts.columns).fill(seconds)))
      c.set_links(
        core.doubles(tables.latency),
        tables.bandwidth === null ? 0 : core.doubles(tables.bandwidth.map((rate) => 1 / rate)),
        tables.message === null ? 0 : core.wholes(tables.message),
      )
      if (tables.tier !== null && tables.tier.some((x) => x !== 0)) c.set_tier(core.doubles(tables.tier))
      c.set_fills(design.weights === "fill" ? 1 : 0)
      this.facts.holdings.forEach(({ name }, h) => {
        if (tables.bytes[name]?.some((x) => x !== 0)) c.set_bytes(h, core.wholes(tables.bytes[name]))
      })
    }

    fit(design, tables, counts) {
      const { core } = this
      const { c } = core
      const all = tables.tokens === null ? design.cap * GIB : design.cap * tables.tokens
      const room = Array.from({ length: counts.P }, (_, rank) =>
        Math.max(0, Math.floor(all) - Object.values(tables.constant).reduce((sum, of) => sum + of[rank], 0)),
      )
      const [recomputes, moves] = [design.recompute === "fit", design.offload === "fit"]
      if (recomputes && moves) core.must(c.simulate(0), "costs")
      const cells = counts.S * (c.has_rows() ? counts.columns : counts.M * counts.k)
      const kinds = core.room(cells)
      core.must(c.fit(core.wholes(room), recomputes ? 1 : 0, moves ? 1 : 0, kinds), "order")
      const found = new Uint8Array(c.memory.buffer, kinds, cells).slice()
      for (const [kind, change] of [[1, c.recompute], [2, c.offload]]) {
        if (!found.includes(kind)) continue
        const chosen = core.room(cells)
        new Uint8Array(c.memory.buffer, chosen, cells).set(found.map((x) => (x === kind ? 1 : 0)))
        core.must(change(chosen), "order")
      }
      core.must(c.lower(), "order")
      return room
    }

    // -- results ----------------------------------------------------------------------------------------------------

    readCounts() {
      const [P, S, M, k, columns, passes, shows] = this.core.readInts(this.core.c.counts(), 7)
      return { P, S, M, k, columns, passes, showsStages: shows !== 0 }
    }

    // Units of all ranks, rank after rank: `first` says where each begins.
    readOrder(result) {
      const { c } = this.core
      const first = [0]
      for (let rank = 0; rank < result.P; rank++) first.push(first[rank] + c.num_units(rank))
      const all = new Int32Array(4 * first[result.P])
      for (let rank = 0; rank < result.P; rank++)
        all.set(this.core.readInts(c.units(rank), 4 * c.num_units(rank)), 4 * first[rank])
      const column = (j) => {
        const values = new Int32Array(first[result.P])
        for (let i = 0; i < values.length; i++) values[i] = all[4 * i + j]
        return values
      }
      Object.assign(result, {
        first: Int32Array.from(first), pass: column(0), stage: column(1), microbatch: column(2), segment: column(3),
        rankOfStage: Array.from(this.core.readInts(c.rank_of_stage(), result.S)),
        segmentsOf: c.has_rows() ? Array.from({ length: result.M }, (_, m) => c.segments_of(m)) : null,
        text: this.core.text(c.text()),
      })
      result.parents = result.segmentsOf === null ? null : this.treesOf(result.segmentsOf)
    }

    readTimes(design, result) {
      const { core } = this
      const { c } = core
      const moves = result.passes & (1 << PASS.O)
      const knowsCauses = !moves && design.weights !== "fill"
      core.must(c.simulate(knowsCauses ? 1 : 0), "costs")
      const { P, first } = result
      const join = (of) => {
        const all = new Float64Array(first[P])
        for (let rank = 0; rank < P; rank++)
          all.set(core.readDoubles(of(rank), first[rank + 1] - first[rank]), first[rank])
        return all
      }
      const limits = core.readDoubles(c.limits(), 8)
      Object.assign(result, {
        makespan: c.makespan(), span: core.readDoubles(c.span(), P), busy: core.readDoubles(c.busy(), P),
        wait: core.readDoubles(c.waiting(), P), start: join(c.start), end: join(c.end),
        slack: knowsCauses ? join(c.slack) : null,
        path: knowsCauses ? core.readInts(c.path(), c.path_length()) : null,
        limits: {
          rank: limits[0], work: limits[1], before: limits[2], behind: limits[3], between: limits[4],
          pathWork: limits[5], pathMessages: limits[6], bubble: limits[7],
        },
      })
      core.must(c.find_inputs(), "order")
      const inputsFirst = core.readInts(c.inputs_first(), first[P] + 1)
      result.inputs = { first: inputsFirst, units: core.readInts(c.inputs(), inputsFirst[first[P]]) }
    }

    readMemory(tables, result) {
      const { core } = this
      const { c } = core
      const { P } = result
      core.must(c.find_peaks(), "costs")
      const numbers = core.readWholes(c.peaks(), 15 * P)
      const of = (j) => Array.from({ length: P }, (_, rank) => numbers[15 * rank + j])
      const held = {}
      this.facts.holdings.forEach((holding, h) => {
        if (holding.counts_with === h) held[holding.name] = of(1 + h)
      })
      held.receive = of(13)
      Object.assign(held, tables.constant)
      core.must(c.find_changes(), "costs")
      const changesFirst = core.readInts(c.changes_first(), P + 1)
      const count = changesFirst[P]
      result.memory = {
        unit: tables.tokens === null ? null : tables.tokens, // of a micro-batch; null: bytes
        units: of(0), held,
        total: of(14).map((x, rank) => Object.values(tables.constant).reduce((sum, each) => sum + each[rank], x)),
        constant: { ...tables.constant, receive: held.receive },
        changes: {
          first: changesFirst,
          when: core.readDoubles(c.changes_when(), count),
          by: core.readDoubles(c.changes_by(), count),
          holding: new Uint8Array(c.memory.buffer, c.changes_holding(), count).slice(),
        },
      }
      const { sizes } = tables
      result.tables = { passes: tables.passes, tier: tables.tier, sizes, built: this.built }
    }
  }

  return Laboratory
})()

// In a worker: the first message opens the laboratory, each other one holds a design.
if (typeof document === "undefined" && typeof onmessage !== "undefined") {
  let laboratory = null
  onmessage = async ({ data }) => {
    if (data.wasm !== undefined) laboratory = Laboratory.open(data.wasm, data.facts)
    else postMessage({ number: data.number, result: (await laboratory).compute(data.design) })
  }
}
