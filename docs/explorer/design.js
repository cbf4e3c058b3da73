// design.js - designs as data: their presets, links that hold them, and what else they are written as.
"use strict"

const Designs = (() => {
  const PLAIN = {
    family: "seq1f1b", P: 4, M: 4, k: 2, v: 1,
    costs: "seconds", F: 1, B: 2, W: null, message: 0, attention: 0, split: "even",
    recompute: "none", offload: "none", tier: 0.5, cap: 2, weights: "planned", options: {}, order: "", parents: "",
  }
  const NUMBERS = new Set(["P", "M", "k", "v", "F", "B", "W", "message", "attention", "tier", "cap"])
  const WORDS = { // of fields that take nothing else
    family: (facts) => ["text", ...facts.families.map(({ name }) => name)],
    costs: (facts) => ["seconds", ...Object.keys(facts.presets)],
    recompute: () => ["none", "all", "fit"],
    offload: () => ["none", "all", "fit"],
    weights: () => ["planned", "fill"],
  }
  const make = (changes) => ({ ...PLAIN, options: {}, ...changes })

  // -- presets ------------------------------------------------------------------------------------------------------

  // Named pairs of designs; the first is what the page shows at first.
  function presets(facts) {
    const found = [{
      group: "Figures", name: "1F1B and Seq1F1B, as in the paper",
      pair: [make({ family: "1f1b", k: 1 }), make({ family: "seq1f1b" })],
    }, {
      group: "Figures", name: "Slow messages, hidden by a longer warm-up",
      pair: [make({ M: 8, k: 4, message: 0.25 }), make({ M: 8, k: 4, message: 0.25, options: { extra_warmup: 1 } })],
    }, {
      group: "Figures", name: "Long sequence: equal lengths, equal times",
      pair: [make({ M: 4, k: 4, attention: 0.6 }), make({ M: 4, k: 4, attention: 0.6, split: "equal" })],
    }, {
      group: "Figures", name: "Half the memory: recomputed, or moved away",
      pair: [make({ M: 8, k: 4, recompute: "fit", cap: 0.75 }), make({ M: 8, k: 4, offload: "fit", cap: 0.75 })],
    }]
    for (const preset of Object.keys(facts.presets)) {
      const { P, title } = facts.presets[preset]
      const model = { costs: preset, P, M: 2 * P, split: "equal" }
      found.push({
        group: "Models on H100", name: `${title}: 1F1B and Seq1F1B`,
        pair: [make({ ...model, family: "1f1b", k: 1 }), make({ ...model, family: "seq1f1b", k: 16 })],
      })
    }
    for (const family of facts.families) {
      const counts = { P: 4, M: family.name === "hanayo" ? 4 : 8, k: family.has_segments ? 4 : 1 }
      const beside = family.has_segments ? "seq1f1b" : "1f1b"
      found.push({
        group: "Families", name: family.name,
        pair: [
          make({ ...counts, ...(family.name === beside ? { family: "gpipe", k: 1 } : { family: beside }) }),
          make({ ...counts, family: family.name, v: family.stages_per_rank }),
        ],
      })
    }
    return found
  }

  // -- links --------------------------------------------------------------------------------------------------------

  // All that a design has, so that a link means the same whatever PLAIN becomes.
  function toLink(pair) {
    const link = new URLSearchParams()
    pair.forEach((design, i) => {
      const side = "ab"[i]
      for (const [name, value] of Object.entries(design)) {
        if (name !== "options" && value !== null && value !== "") link.set(`${side}.${name}`, value)
      }
      for (const [option, value] of Object.entries(design.options)) link.set(`${side}.option.${option}`, value)
    })
    return link.toString()
  }

  // The designs of a link; null where it holds none. What means nothing is left out.
  function fromLink(text, facts) {
    const pair = []
    for (const [key, value] of new URLSearchParams(text)) {
      const [side, name, option] = key.split(".")
      const i = "ab".indexOf(side)
      if (i < 0 || side.length !== 1 || (!(name in PLAIN) && name !== "option")) continue
      pair[i] ??= make({})
      const number = value === "" ? null : Number(value)
      if (name === "option") pair[i].options[option] = Number.isFinite(number) && number !== null ? number : value
      else if (WORDS[name] && !WORDS[name](facts).includes(value)) continue
      else if (!NUMBERS.has(name)) pair[i][name] = value
      else if (number === null || Number.isFinite(number)) pair[i][name] = number ?? PLAIN[name]
    }
    return pair[0] === undefined ? null : pair.filter((design) => design !== undefined)
  }

  // -- what a sentence of the checker names -------------------------------------------------------------------------

  const UNIT = /(?:\[\d+\])?[FBIWRSTEGOAL]\d+\.\d+/g

  // The places in an order's text that a sentence means: {begin, end} of characters, with rank and name.
  function marks(sentence, order) {
    let lines = []
    let at = 0
    for (const line of order.split("\n")) {
      const isOfRank = !/^[ \t]*parents\b/.test(line)
      const words = line.split("#")[0].matchAll(isOfRank ? /[^ \t,]+/g : /[^ \t]+/g)
      const units = [...words].map((word) => {
        const begin = at + word.index
        return { name: word[0], begin, end: begin + word[0].length }
      })
      if (units.length) lines.push({ number: order.slice(0, at).split("\n").length, units, isOfRank })
      at += line.length + 1
    }
    const read = sentence.match(/^line (\d+), unit (\d+)/)
    if (read) {
      const line = lines.find(({ number }) => number === Number(read[1]))
      const unit = line?.units[Number(read[2]) - 1]
      return unit ? [{ ...unit, rank: lines.filter(({ isOfRank }) => isOfRank).indexOf(line) }] : []
    }
    lines = lines.filter(({ isOfRank }) => isOfRank)
    const twice = sentence.match(/order of rank (\d+), at positions (\d+) and (\d+)/)
    if (twice) return [twice[2], twice[3]].map((i) => ({ ...lines[twice[1]].units[i], rank: Number(twice[1]) }))
    const found = []
    for (const part of sentence.split("; ")) {
      const ranks = [...part.matchAll(/rank (\d+)/g)]
      for (const unit of part.matchAll(UNIT)) {
        const behind = part.slice(unit.index + unit[0].length).match(/^ of rank (\d+)/)
        const before = ranks.filter((m) => m.index < unit.index).pop()
        const rank = Number((behind ?? before ?? ranks[0])?.[1] ?? -1)
        const place = lines[rank]?.units.find(({ name }) => name === unit[0])
        if (place && !found.some((one) => one.begin === place.begin)) found.push({ ...place, rank })
      }
    }
    return found
  }

  // -- as text ------------------------------------------------------------------------------------------------------

  // Torch's action CSV, as Schedule.to_csv writes it; null where torch has no cell for a pass, and no parents.
  function toCsv(result, passes) {
    if (result.parents) return null
    const { first, pass, stage, microbatch, segment, k } = result
    const lines = []
    for (let rank = 0; rank + 1 < first.length; rank++) {
      const cells = []
      for (let i = first[rank]; i < first[rank + 1]; i++) {
        const { letter } = passes[pass[i]]
        if (!"FBIW".includes(letter)) return null
        cells.push(`${stage[i]}${letter}${microbatch[i] * k + segment[i]}`)
      }
      lines.push(`${cells.join(",")}\n`)
    }
    return lines.join("")
  }

  // A table [stage][segment] in Python, with segmentsOf [stage][micro-batch][segment]; one number where all are equal.
  function tableText(values, S, segmentsOf = null) {
    if (values.every((x) => x === values[0])) return numberText(values[0])
    const columns = values.length / S
    const text = (row) => `[${Array.from(row, numberText).join(", ")}]`
    const rows = Array.from({ length: S }, (_, s) => {
      let at = s * columns
      if (segmentsOf === null) return text(values.slice(at, at + columns))
      return `[${segmentsOf.map((count) => text(values.slice(at, (at += count)))).join(", ")}]`
    })
    return rows.every((row) => row === rows[0]) ? `[${rows[0]}] * ${S}` : `[${rows.join(", ")}]`
  }

  const numberText = (x) => (Number.isInteger(x) && Math.abs(x) < 1e15 ? `${x}` : `${x}`.replace(/e\+/, "e"))

  // The lines of Python that build and simulate a design that the laboratory has computed.
  function toPython(design, result, facts) {
    const family = facts.families.find((one) => one.name === design.family)
    const isModel = design.costs !== "seconds"
    const { S, k, segmentsOf } = result
    const table = (values) => tableText(values, S, segmentsOf)
    const imports = ["build_schedule"]
    const setup = []
    const { tables } = result
    const own = Object.entries(design.options).filter(([name]) => family?.options.includes(name))
    const given = own.map(([name, value]) => `"${name}": ${JSON.stringify(value)}`)
    const lines = []
    let costs
    let memory = null
    const moves = design.offload !== "none"
    if (isModel) {
      const preset = facts.presets[design.costs]
      const layout = Object.entries(preset.layout).map(([name, n]) => `${name}=${n}`).join(", ")
      setup.push(
        "from seq1f1b.plan import Layout", "from seq1f1b.planning.cost import CostModel",
        "from seq1f1b.planning.hardware import load_hardware, load_model",
      )
      lines.push(
        "cost = CostModel.balanced(",
        `    load_model("${preset.model}"), load_hardware("h100"),`,
        `    num_ranks=${result.P}, stages_per_rank=${S / result.P}, seq_len=${preset.tokens},`,
        `    layout=Layout(${layout}),`,
        ")",
        design.split === "equal" ? `sizes = cost.split(${k})` : `sizes = [${preset.tokens / k}] * ${k}`,
        "price = cost.price(sizes)",
      )
      if (family?.options.includes("costs")) {
        lines.push("seconds = price.seconds")
        given.push('"costs": (seconds.forward, seconds.input, seconds.weight)')
      }
      costs = `price.costs(schedule${moves ? ", moves=True" : ""})`
      memory = "price.step_memory(schedule.rank_of_stage)"
    } else {
      const passes = { forward: tables.passes.F, backward: tables.passes.B, weight: tables.passes.W }
      const named = Object.entries(passes).filter(([, of]) => of).map(([name, of]) => `${name}=${table(of)}`)
      if (family?.options.includes("costs")) {
        const [F, I, W] = tables.built.map(table)
        given.push(`"costs": (${F}, ${I}, ${W})`)
        if (family.options.includes("transfer")) given.push(`"transfer": ${numberText(design.message)}`)
      }
      if (design.message > 0) named.push(`links=Links(latency=${numberText(design.message)})`)
      if (moves) named.push(`tier=${table(tables.tier)}`)
      imports.unshift("Costs", ...(design.message > 0 ? ["Links"] : []))
      costs = `Costs(${named.join(", ")})`
      const sizes = tables.sizes
      if (sizes !== null) memory = `StepMemory(activations=${tableText(Array(S).fill(sizes).flat(), S)})`
      if (memory) setup.push("from seq1f1b.schedule import StepMemory")
    }
    if (design.family === "text") {
      imports[imports.indexOf("build_schedule")] = "Schedule"
      lines.push(`schedule = Schedule.from_text("""\\\n${design.order.trim()}\n""")`)
    } else {
      const { P, M, v } = design
      const segments = result.parents === null ? k : `[${segmentsOf.join(", ")}]`
      const counts = `num_ranks=${P}, num_microbatches=${M}, num_segments=${segments}, stages_per_rank=${v}`
      const trees = result.parents?.map((own) => `[${own.join(", ")}]`).join(", ")
      const options = given.length ? `,\n    options={${given.join(", ")}}` : ""
      const extra = trees ? `,\n    parents=[${trees}]${options}` : options
      lines.push(`schedule = build_schedule(\n    "${design.family}", ${counts}${extra},\n)`)
    }
    if (design.weights === "fill") {
      if (result.deferred) lines.push("schedule = schedule.defer_weights()")
      lines.push('schedule = schedule.replace(weights="fill")')
    }
    if (design.recompute === "all") lines.push("schedule = schedule.recompute()")
    if (design.offload === "all") lines.push("schedule = schedule.offload()")
    lines.push(`costs = ${costs}`)
    if (memory) lines.push(`memory = ${memory}`)
    if (memory && result.room) {
      const by = ["recompute", "offload"].filter((way) => design[way] === "fit").map((way) => `"${way}"`)
      const room = result.room.every((x) => x === result.room[0]) ? result.room[0] : `[${result.room.join(", ")}]`
      lines.push(`schedule = schedule.fit(memory, ${room}, by=(${by.join(", ")},), costs=costs)`)
    }
    lines.push(`run = schedule.simulate(costs${memory ? ", memory=memory" : ""})`)
    lines.push("print(run.to_text())", "print(run.makespan, run.bubble_ratio, run.peak)")
    return [`from seq1f1b import ${imports.sort().join(", ")}`, ...setup, "", ...lines, ""].join("\n")
  }

  return { PLAIN, make, presets, toLink, fromLink, marks, toCsv, toPython }
})()
