/**
 * The panel of GraftDataset: thumbnails with their captions, buckets and problems, from the node's `graft_dataset` output:
 * [{pictures: [{name, caption, bucket, thumbnail?: {filename, subfolder, type}}], buckets: [{width, height, pictures}], problems: [text]}].
 */
import { el } from './dom.js'
import { addDisplay, api, chain, fit } from './editor.js'

const SHOWN = 60

/** Give a GraftDataset node its panel. */
export function addDatasetPanel(node) {
  const content = el('div', { class: 'graft-content' }, el('div', { class: 'graft-dim' }, 'Pictures, buckets and problems are shown here once it has run.'))
  addDisplay(node, 'pictures', el('div', { class: 'graft graft-panel graft-dataset' }, content), () => Math.max(24, content.offsetHeight) + 4)
  chain(node, 'onExecuted', (output) => {
    const found = output?.graft_dataset?.[0]
    if (!found) return
    const tabs = { Pictures: () => pictures(found.pictures), Buckets: () => buckets(found.buckets), Problems: () => problems(found.problems) }
    const counts = { Pictures: found.pictures.length, Buckets: found.buckets.length, Problems: found.problems.length }
    const body = el('div', { class: 'graft-scroll', role: 'tabpanel', tabIndex: 0 })
    const bar = el('div', { class: 'graft-tabs', role: 'tablist' })
    const show = (name) => {
      body.replaceChildren(tabs[name]())
      for (const tab of bar.children) tab.setAttribute('aria-selected', String(tab.dataset.name === name))
      requestAnimationFrame(() => node.graph && fit(node))
    }
    bar.append(...Object.keys(tabs).map((name) => {
      const tab = el('button', { class: 'graft-button', type: 'button', role: 'tab', onclick: () => show(name) }, `${name} (${counts[name]})`)
      tab.dataset.name = name
      return tab
    }))
    content.replaceChildren(bar, body)
    show(counts.Problems ? 'Problems' : 'Pictures')
  })
}

function pictures(found) {
  const shown = found.slice(0, SHOWN).map((picture) => {
    const caption = Array.isArray(picture.captions) ? picture.captions.join(' | ') : (picture.caption ?? '')
    const query = picture.thumbnail && new URLSearchParams({ subfolder: '', ...picture.thumbnail })
    return el('figure', { title: `${picture.name}\n${caption}` },
      query ? el('img', { src: api.apiURL(`/view?${query}`), alt: picture.name, loading: 'lazy' }) : null,
      el('figcaption', {}, el('b', {}, picture.name), ` ${caption}`))
  })
  const more = found.length - SHOWN
  return el('div', {}, el('div', { class: 'graft-pictures' }, ...shown), more > 0 ? el('div', { class: 'graft-dim' }, `and ${more} more`) : null)
}

function buckets(found) {
  const body = found.map((bucket) => el('tr', {}, el('td', {}, `${bucket.width} × ${bucket.height}`), el('td', {}, String(bucket.pictures))))
  return el('table', { class: 'graft-table', 'aria-label': 'Buckets' },
    el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'size'), el('th', { scope: 'col' }, 'pictures'))), el('tbody', {}, ...body))
}

function problems(found) {
  return found.length ? el('ul', {}, ...found.map((problem) => el('li', { class: 'graft-problem' }, problem))) : el('div', {}, 'None.')
}
