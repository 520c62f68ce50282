/** The size of the latent that is linked to an input, read from the graph before anything has run. */
import { app } from './editor.js'

/** Nodes that make a latent: pixels per latent cell, and images per latent frame (0: no frames). */
const MAKERS = {
  EmptyLatentImage: [8, 0],
  EmptySD3LatentImage: [8, 0],
  EmptyFlux2LatentImage: [16, 0],
  EmptyHunyuanLatentVideo: [8, 4],
  EmptyCosmosLatentVideo: [8, 8],
}
/** Nodes that pass a latent on in the same size, and the input it comes in by. */
const PASSED = {
  KSampler: 'latent_image',
  KSamplerAdvanced: 'latent_image',
  SamplerCustom: 'latent_image',
  SamplerCustomAdvanced: 'latent_image',
  RepeatLatentBatch: 'samples',
  LatentFromBatch: 'samples',
  SetLatentNoiseMask: 'samples',
  Reroute: '',
}
const MOST = 100 // nodes on the way, against a graph that leads round in circles

/**
 * The size of the latent linked to a node's input: {kind (of the node that makes it), height, width, frames}, in latent
 * cells. null when no latent is linked or the graph does not tell its size.
 */
export function latentOf(node, name) {
  let from = source(node, name)
  for (let seen = 0; from && seen < MOST; seen++) {
    const kind = from.node.type
    if (kind in MAKERS) return made(from.node, ...MAKERS[kind])
    if (!(kind in PASSED)) return null
    from = source(from.node, PASSED[kind])
  }
  return null
}

function made(node, cell, pictures) {
  const [height, width, length] = [number(node, 'height'), number(node, 'width'), pictures ? number(node, 'length') : 1]
  if (!(height >= cell && width >= cell && length >= 1)) return null
  return {
    kind: node.type,
    height: Math.floor(height / cell),
    width: Math.floor(width / cell),
    frames: pictures ? Math.floor((length - 1) / pictures) + 1 : 1,
  }
}

/** The value of a widget, or of the widget that its input is linked to; undefined when it is computed while running. */
export const valueOf = (node, name) => widgetOf(node, name)?.value

/** The widget that an input's value comes from: its own, or that which it is linked to; undefined as with `valueOf`. */
export function widgetOf(node, name) {
  const from = source(node, name)
  const [holder, widget] = from ? [from.node, from.widget ?? 'value'] : [node, name]
  return holder.widgets?.find((one) => one.name === widget)
}

const number = (node, name) => Number(valueOf(node, name) ?? NaN)

/**
 * Where the link into an input comes from: {node}, through the walls of subgraphs; {node, widget} for a widget on a
 * subgraph's node; null without a link.
 */
export function source(node, name) {
  const link = linkOf(node, name)
  return link ? origin(node.graph, link) : null
}

/** The link into an input, if there is one. */
export function linkOf(node, name) {
  const slot = node.inputs?.findIndex((one) => one.name === name) ?? -1
  if (slot < 0 || !node.graph) return undefined // a copy is in no graph at first
  return linkInto(node.graph, node.id, slot)
}

/** The link that ends at a node's input, by place: the graph knows it in every version of the editor. */
function linkInto(graph, id, slot) {
  const ends = (link) => String(link.target_id) === String(id) && link.target_slot === slot
  return [...graph.links.values()].find(ends)
}

function origin(graph, link) {
  if (!link) return null
  if (link.origin_id === graph.inputNode?.id) return outside(graph, link)
  const node = graph.getNodeById(link.origin_id)
  if (!node?.subgraph) return node ? { node } : null
  const { subgraph } = node
  return origin(subgraph, linkInto(subgraph, subgraph.outputNode.id, link.origin_slot))
}

/** Where a link that begins at a subgraph's own input comes from in the graph around it. */
function outside(subgraph, link) {
  const outer = holderOf(subgraph)
  const input = outer?.inputs[link.origin_slot]
  if (!input) return null
  const outerLink = linkInto(outer.graph, outer.id, link.origin_slot)
  return outerLink ? origin(outer.graph, outerLink) : { node: outer, widget: input.name }
}

/** The node that stands for a subgraph in the graph around it, the first if there are several. */
function holderOf(subgraph, graph = app.rootGraph ?? app.graph) {
  for (const node of graph.nodes) {
    const found = node.subgraph === subgraph ? node : node.subgraph && holderOf(subgraph, node.subgraph)
    if (found) return found
  }
  return null
}
