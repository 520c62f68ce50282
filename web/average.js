/**
 * The panel of EMAMerge: how much of the average each step is, from the node's `graft_profile` output. The workflow keeps
 * it as the property `graft profile`, thinned out, so that it is there again after a reload.
 */
import { Series, draw } from './chart.js'
import { el, short, whenRecolored } from './dom.js'
import { addPanel, chain, fit, remember, whenWide } from './editor.js'
import { t } from './texts.js'

const PROPERTY = 'graft profile'
const KEPT = 100 // points of a curve
const HEIGHT = 120
const COLORS = ['#4c8dd6', '#c77520', '#369960', '#aa76c2', '#d65f5f']

/** Give an EMAMerge node its panel. */
export function addAveragePanel(node) {
  const canvas = el('canvas', {
    class: 'graft-chart',
    role: 'img',
    'aria-label': t('Share of each step in the average'),
    hidden: true,
  })
  canvas.style.height = `${HEIGHT}px`
  const legend = el('div', { class: 'graft-legend' })
  const said = el('div', { class: 'graft-dim' }, t('Run the node to see how much each step counts in the average.'))
  const content = el('div', { class: 'graft-content' }, canvas, legend, said)
  addPanel(node, 'average', content)
  let curves = []
  const redraw = () =>
    draw(canvas, content.clientWidth || node.size[0] - 24, HEIGHT, curves, (value) => short(value, 2))
  whenWide(content, () => curves.length && redraw())
  whenRecolored(canvas, redraw)
  const show = () => {
    const found = node.properties?.[PROPERTY]
    if (!Array.isArray(found?.curves)) return
    curves = found.curves.map((curve, index) => {
      const series = new Series()
      curve.steps.forEach((step, at) => series.add(step, curve.values[at]))
      return { series, color: COLORS[index % COLORS.length], width: 2, dots: curve.steps.length <= 12 }
    })
    legend.replaceChildren(
      ...found.curves.flatMap((curve, index) =>
        curve.name ? [el('span', { style: `--curve: ${COLORS[index % COLORS.length]}` }, curve.name)] : [],
      ),
    )
    said.replaceChildren(...found.lines.map((line) => el('div', {}, line)))
    canvas.hidden = !curves.length
    requestAnimationFrame(() => {
      redraw()
      if (node.graph) fit(node)
    })
  }
  chain(node, 'onExecuted', (output) => {
    const found = output?.graft_profile?.[0]
    if (!found) return
    remember(node, PROPERTY, { curves: found.curves.map(thinned), lines: found.lines })
    show()
  })
  chain(node, 'onConfigure', show)
}

/** At most so many points of a curve, the last one among them; values as exact as a chart shows them. */
function thinned({ name, steps, values }) {
  const every = Math.ceil(steps.length / KEPT)
  const kept = steps.map((_, index) => index).filter((index) => (steps.length - 1 - index) % every === 0)
  return {
    name,
    steps: kept.map((index) => steps[index]),
    values: kept.map((index) => Number(values[index]?.toPrecision(6))),
  }
}
