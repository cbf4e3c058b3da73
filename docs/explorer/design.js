// design.js - designs as data: their presets, links that hold them, and what else they are written as.
"use strict"

const Designs = (() => {
  const PLAIN = {
    family: "seq1f1b", P: 4, M: 4, k: 2, v: 1, parents: "", options: {}, order: "",
    F: 1, B: 2, W: null, message: 0, attention: 0, split: "even",
    recompute: "none", offload: "none", tier: 0.5, cap: 2,
  }
  const NAMES = { F: "forward", B: "backward", W: "weight" }
  const make = (changes) => ({ ...PLAIN, ...changes })

  // Named pairs of designs; the first is what the page shows at first.
  const long = { k: 4, attention: 0.6 }
  const presets = Object.entries({
    "1F1B and Seq1F1B, as in the paper": [{ family: "1f1b", k: 1 }, {}],
    "Slow messages, hidden by a longer warm-up": [{}, { options: { extra_warmup: 1 } }].map(
      (one) => ({ M: 8, k: 4, message: 0.25, ...one }),
    ),
    "Long sequence: equal lengths, equal times": [long, { ...long, split: "equal" }],
    "Half the memory: recomputed, or moved away": [{ recompute: "fit" }, { offload: "fit" }].map(
      (one) => ({ M: 8, k: 4, cap: 0.75, ...one }),
    ),
  }).map(([name, pair]) => ({ name, pair: pair.map(make) }))

  const toLink = (pair) => encodeURIComponent(JSON.stringify(pair))

  // The designs of a link; null where it holds none.
  function fromLink(text) {
    try {
      const [a, b = a] = JSON.parse(decodeURIComponent(text))
      return [make(a), make(b)]
    } catch {
      return null
    }
  }

  // The lines of Python that build and simulate a design that the laboratory has computed.
  function toPython(design, result, facts) {
    const { S, k, trees, tables: { passes, latency, tier } } = result
    const list = (values) => `[${Array.from(values).join(", ")}]`
    const flat = (values) => (values.every((x) => x === values[0]) ? `${values[0] ?? 0}` : list(values))
    const table = (values) => { // [stage][segment], or [stage][micro-batch][segment]
      if (values.every((x) => x === values[0])) return `${values[0]}`
      const columns = values.length / S
      const rows = Array.from({ length: S }, (_, s) => Array.from(values.slice(s * columns, (s + 1) * columns)))
      const ofMicrobatches = (row) => `[${trees.map((own) => list(row.splice(0, own.length))).join(", ")}]`
      return `[${rows.map((row) => (trees ? ofMicrobatches(row) : list(row))).join(", ")}]`
    }
    const lines = ["from seq1f1b import Costs, Links, Schedule, build_schedule", ""]
    if (design.family === "text") lines.push(`schedule = Schedule.from_text("""\\\n${design.order.trim()}\n""")`)
    else {
      const { options } = facts.families.find(({ name }) => name === design.family)
      const given = Object.entries(design.options).filter(([name]) => options.includes(name))
      const named = given.map(([name, value]) => `"${name}": ${JSON.stringify(value)}`)
      if (options.includes("costs")) {
        const weight = passes.W ?? passes.B.map((x) => 0.5 * x)
        const input = passes.B.map((x, i) => x - weight[i])
        named.push(`"costs": (${[passes.F, input, weight].map(table).join(", ")})`)
        if (options.includes("transfer")) named.push(`"transfer": ${design.message}`)
      }
      const { P, M, v } = design
      const segments = trees ? list(trees.map((own) => own.length)) : k
      lines.push(
        "schedule = build_schedule(", `    "${design.family}", num_ranks=${P}, num_microbatches=${M},`,
        `    num_segments=${segments}, stages_per_rank=${v}, options={${named.join(", ")}},`,
        ...(trees ? [`    parents=[${trees.map(list).join(", ")}],`] : []), ")",
      )
    }
    for (const [way, letter] of [["recompute", "R"], ["offload", "O"]]) {
      if (design[way] === "all") lines.push(`schedule = schedule.${way}()`)
      if (design[way] !== "fit") continue
      const cell = (p, i) => [facts.style.passes[p].letter, result.stage[i], result.microbatch[i], result.segment[i]]
      const chosen = Array.from(result.pass, cell).filter(([one]) => one === letter)
      const cells = chosen.map(([, ...numbers]) => `(${numbers.join(", ")})`)
      lines.push(`chosen = {${["()", ...cells].join(", ")}}  # (stage, micro-batch, segment)`)
      lines.push(`schedule = schedule.${way}(lambda unit: unit[1:] in chosen)`)
    }
    const costs = Object.entries(passes).map(([letter, values]) => `${NAMES[letter]}=${table(values)}`)
    if (design.offload !== "none") costs.push(`tier=${table(tier)}`)
    lines.push("costs = Costs(", ...costs.map((one) => `    ${one},`), `    links=Links(latency=${flat(latency)}),`, ")")
    lines.push("run = schedule.simulate(costs)", "print(run.to_text())", "print(run.makespan, run.bubble_ratio)")
    return `${lines.join("\n")}\n`
  }

  return { make, presets, toLink, fromLink, toPython }
})()
