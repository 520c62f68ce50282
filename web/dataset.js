/**
 * The panel of GraftDataset: thumbnails with captions, buckets and problems, from the node's `graft_dataset` output
 * (training/data/folder_report.py makes it).
 */
import { el } from './dom.js'
import { addPanel, api, chain, fit } from './editor.js'
import { t } from './texts.js'

const AT_ONCE = 24

/** Give a GraftDataset node its panel. */
export function addDatasetPanel(node) {
  const content = el(
    'div',
    { class: 'graft-content' },
    el('div', { class: 'graft-dim' }, t('Run the node to see its images, buckets and problems here.')),
  )
  addPanel(node, 'dataset', content)
  chain(node, 'onExecuted', (output) => {
    const found = output?.graft_dataset?.[0]
    if (!found) return
    const typed = node.widgets?.find((widget) => widget.name === 'folder')?.value
    const folder = String(found.folder || typed)
    const tabs = {
      Images: () => pictures(found.pictures, folder),
      Buckets: () => buckets(found.buckets),
      Problems: () => problems(found.problems),
    }
    const counts = { Images: found.count, Buckets: found.buckets.length, Problems: found.problems.length }
    const body = el('div', { class: 'graft-scroll', role: 'tabpanel', tabIndex: 0 })
    const bar = el('div', { class: 'graft-tabs', role: 'tablist' })
    const show = (name) => {
      body.replaceChildren(tabs[name]())
      for (const tab of bar.children) tab.setAttribute('aria-selected', String(tab.dataset.name === name))
      requestAnimationFrame(() => node.graph && fit(node))
    }
    bar.append(
      ...Object.keys(tabs).map((name) => {
        const tab = el(
          'button',
          { class: 'graft-button', type: 'button', role: 'tab', onclick: () => show(name) },
          `${t(name)} (${counts[name]})`,
        )
        tab.dataset.name = name
        return tab
      }),
    )
    content.replaceChildren(bar, body)
    show(counts.Problems ? 'Problems' : 'Images')
  })
}

function pictures(found, folder) {
  const strip = el('div', { class: 'graft-pictures' })
  const more = el('button', { class: 'graft-button', type: 'button', onclick: () => add() }, t('More'))
  const add = () => {
    const from = strip.childElementCount
    strip.append(...found.slice(from, from + AT_ONCE).map((picture) => thumbnail(picture, folder)))
    more.hidden = strip.childElementCount >= found.length
  }
  add()
  return el('div', {}, strip, more)
}

function thumbnail(picture, folder) {
  const parts = [...folder.split(/[\\/]/), ...picture.name.split('/')].filter(Boolean)
  const query = new URLSearchParams({
    filename: parts.pop(),
    subfolder: parts.join('/'),
    type: 'input',
    preview: 'webp;70',
  })
  const facts = [
    `${picture.width}×${picture.height} → ${picture.bucket.join('×')}`,
    picture.held_out ? t('held out') : null,
    picture.mask ? t('mask') : null,
    picture.captioned ? null : t('no caption'),
  ]
  const caption = `${picture.caption}${picture.varies ? t(' (varies)') : ''}`
  return el(
    'figure',
    { title: `${picture.name}\n${facts.filter(Boolean).join(', ')}\n${caption}` },
    el('img', { src: api.apiURL(`/view?${query}`), alt: picture.name, loading: 'lazy' }),
    el('figcaption', {}, el('b', {}, picture.name), ` ${caption}`),
  )
}

function buckets(found) {
  const heads = [t('size'), t('trained'), t('held out')]
  const body = found.map((bucket) =>
    el(
      'tr',
      {},
      el('td', {}, `${bucket.width} × ${bucket.height}${bucket.batch_id ? ` ${bucket.batch_id}` : ''}`),
      el('td', {}, String(bucket.train)),
      el('td', {}, String(bucket.held_out)),
    ),
  )
  return el(
    'table',
    { class: 'graft-table', 'aria-label': t('Buckets') },
    el('thead', {}, el('tr', {}, ...heads.map((head) => el('th', { scope: 'col' }, head)))),
    el('tbody', {}, ...body),
  )
}

function problems(found) {
  if (!found.length) return el('div', {}, t('None.'))
  return el(
    'ul',
    { class: 'graft-list' },
    ...found.map(({ name, message }) => el('li', { class: 'graft-problem' }, message ? `${name}: ${message}` : name)),
  )
}
