/**
 * Advanced settings are folded away until someone asks for them. Nodes 2.0 does that by itself; the classic canvas does
 * it here, with the same switch (the node's `showAdvanced`, in its menu).
 */
import { app, chain, fit } from './editor.js'

const INPUT = 1 // of the kinds of sockets, as the canvas numbers them
const OUT_OF_REACH = -1e6 // in units of the canvas, above its node

/** Fold a node's advanced settings; those that a loaded workflow has set or linked stay in sight. */
export function foldAdvanced(node) {
  const folded = (node.widgets ?? []).filter((widget) => optionsOf(node, widget).advanced)
  if (!folded.length) return
  for (const widget of folded) {
    hide(widget, () => isClassic() && widget.advanced && !isOpen(node) && !isLinked(node, widget))
  }
  fit(node, true) // it was made with room for all of them
  chain(node, 'onConnectionsChange', (type, index) => {
    const name = type === INPUT && node.inputs[index]?.widget?.name
    if (isClassic() && !isOpen(node) && folded.some((widget) => widget.name === name)) fit(node) // it comes into sight
  })
  chain(node, 'onConfigure', (saved) => {
    if (saved.showAdvanced !== undefined) return // as a person left it
    const set = folded.filter((widget) => isSet(node, widget) || isLinked(saved, widget))
    for (const widget of folded) keepInSight(widget, set.includes(widget))
    if (isClassic()) fit(node)
  })
}

function keepInSight(widget, isKept) {
  widget.advanced = !isKept
  widget.options.advanced = !isKept // where Nodes 2.0 looks, which keeps the object
}

/**
 * Hide a widget on the classic canvas, without a gap where it was, as long as `isFolded()`. The canvas keeps the socket of
 * a hidden widget where that was drawn last, or would be, in front of the widget that is there now: it would get that
 * one's links and tooltips. So the socket is put out of reach.
 */
function hide(widget, isFolded) {
  const { computeSize } = widget
  let { y } = widget
  widget.advanced = true // the canvas's menu offers to show it
  Object.defineProperties(widget, {
    hidden: { get: isFolded, configurable: true },
    computeSize: { get: () => (isFolded() ? noSize : computeSize), configurable: true },
    y: {
      get: () => (isFolded() ? OUT_OF_REACH : y),
      set: (drawn) => {
        y = drawn
      },
      configurable: true,
      enumerable: true,
    },
  })
}

const noSize = () => [0, -4] // front end 1.27 lays hidden widgets out too, 4 pixels apart

const isClassic = () => !window.LiteGraph?.vueNodesMode

const isOpen = (node) =>
  node.showAdvanced || app.extensionManager?.setting?.get('Comfy.Node.AlwaysShowAdvancedWidgets') === true

/** Whether a widget differs from what a new node has. */
function isSet(node, widget) {
  const { default: declared, options } = optionsOf(node, widget)
  return widget.value !== (declared ?? options?.[0])
}

/** Whether a widget's input of a node, or of a saved one, has a link. */
const isLinked = (node, widget) =>
  (node.inputs ?? []).some((input) => input.widget?.name === widget.name && (input.link ?? null) !== null)

/** What the host says of a widget's input; nothing for one that is not the node's own. */
function optionsOf(node, widget) {
  const { required, optional } = node.constructor.nodeData?.input ?? {}
  return (required?.[widget.name] ?? optional?.[widget.name])?.[1] ?? {}
}
