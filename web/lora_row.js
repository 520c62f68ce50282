/** One row of a LoRA stack: handle, switch, file with its picture, strengths, and what folds out below. */
import { el } from './dom.js'
import { about, thumbnail } from './lora_about.js'
import { known } from './lora_files.js'
import { details } from './row_details.js'
import { plain } from './rows.js'
import { strengthField } from './strength_field.js'
import { t } from './texts.js'

/** The element of a row of a panel. */
export function drawRow(panel, row, index) {
  const where = t('row {number}, {file}', { number: index + 1, file: row.file })
  const handle = el(
    'button',
    {
      class: 'graft-icon graft-handle',
      type: 'button',
      title: t('Drag to reorder, or use the arrow keys'),
      'aria-label': t('Move {where}', { where }),
      onkeydown: (event) => {
        const by = { ArrowUp: -1, ArrowDown: 1 }[event.key]
        if (!by) return
        event.preventDefault()
        event.stopPropagation()
        panel.move(row, panel.rows.indexOf(row) + by)
      },
    },
    '⠿',
  )
  const on = el('input', {
    type: 'checkbox',
    class: 'graft-on',
    checked: row.on,
    title: t('On or off'),
    'aria-label': t('Use {where}', { where }),
  })
  on.addEventListener('change', () => {
    panel.set(row, 'on', on.checked)
    item.classList.toggle('graft-off', !row.on)
    panel.check()
  })
  const strength = (name, label) =>
    strengthField(
      `graft-${name}`,
      label,
      () => row[name],
      (value) => panel.set(row, name, value),
    )
  const line = el(
    'div',
    { class: 'graft-line' },
    handle,
    on,
    fileButton(panel, row, where),
    strength('model', t('Model strength of {where}', { where })),
    strength('clip', t('CLIP strength of {where}', { where })),
    toggle(panel, row, 'i', 'graft-info-button', t('File info of {where}', { where }), panel.informed),
    toggle(panel, row, '⋯', 'graft-more', t('Block weights and schedule of {where}', { where }), panel.unfolded),
    removeButton(panel, row, where),
  )
  const note = el('div', { class: 'graft-note', role: 'alert', hidden: true })
  const item = el('div', { class: `graft-row${row.on ? '' : ' graft-off'}`, role: 'listitem' }, line, note)
  const refit = () => panel.refit()
  if (panel.informed.has(row)) item.append(about(row.file, refit))
  if (panel.unfolded.has(row)) item.append(details(row, where, (name, value) => panel.set(row, name, value), refit))
  item.addEventListener('contextmenu', (event) => {
    if (['INPUT', 'TEXTAREA'].includes(event.target.tagName)) return // the browser's own: cut, copy, paste
    event.preventDefault()
    event.stopPropagation()
    panel.openMenu(row, { x: event.clientX, y: event.clientY })
  })
  dragging(panel, handle, item, row)
  return item
}

/** The file: its name first, its folder after, its picture before. */
function fileButton(panel, row, where) {
  const parts = row.file.replace(/\.safetensors$/i, '').split(/[\\/]/)
  const name = parts.pop()
  const folder = parts.join('/')
  const button = el(
    'button',
    {
      class: 'graft-button graft-file',
      type: 'button',
      title: row.file,
      'aria-label': t('File of {where}; choose another', { where }),
      onclick: () => panel.choose(row, button),
    },
    el(
      'span',
      { class: 'graft-file-text' },
      el('span', { class: 'graft-file-name' }, name),
      folder ? el('span', { class: 'graft-file-folder graft-dim' }, folder) : null,
    ),
  )
  picture(panel, row.file, button).catch(() => {}) // the file's info says what is wrong
  return button
}

/** Put the small picture of a file before its name, if it has one. */
async function picture(panel, file, button) {
  if (!(await known()).has(plain(file))) return
  const image = await thumbnail(file)
  if (!image) return
  button.prepend(image)
  panel.refit()
}

function toggle(panel, row, sign, kind, label, opened) {
  return el(
    'button',
    {
      class: `graft-icon ${kind}`,
      type: 'button',
      title: label,
      'aria-label': label,
      'aria-expanded': String(opened.has(row)),
      onclick: () => panel.unfold(opened, row, `.${kind}`),
    },
    sign,
  )
}

function removeButton(panel, row, where) {
  return el(
    'button',
    {
      class: 'graft-icon graft-remove',
      type: 'button',
      title: t('Remove'),
      'aria-label': t('Remove {where}', { where }),
      onclick: () => panel.remove(row),
    },
    '✕',
  )
}

/** Let a row be dragged to another place by its handle. */
function dragging(panel, handle, item, row) {
  handle.addEventListener('pointerdown', (event) => {
    if (event.button !== 0) return
    handle.setPointerCapture(event.pointerId)
    item.classList.add('graft-dragged')
    const order = [...panel.list.children]
    let to = panel.rows.indexOf(row)
    const move = (at) => {
      const others = order.filter((other) => other !== item)
      const before = others.filter((other) => {
        const box = other.getBoundingClientRect()
        return at.clientY > box.top + box.height / 2
      }).length
      if (before === to) return
      to = before
      panel.list.insertBefore(item, others[before] ?? null)
      handle.setPointerCapture(event.pointerId)
    }
    const end = (last) => {
      handle.removeEventListener('pointermove', move)
      handle.removeEventListener('pointerup', end)
      handle.removeEventListener('pointercancel', end)
      item.classList.remove('graft-dragged')
      const from = panel.rows.indexOf(row)
      if (last.type === 'pointerup' && to !== from) panel.move(row, to)
      else panel.draw()
    }
    handle.addEventListener('pointermove', move)
    handle.addEventListener('pointerup', end)
    handle.addEventListener('pointercancel', end)
  })
}
