/** Named sets of LoRA rows, kept among the user's files on the server, so that every workflow has them. */
import { api } from './editor.js'
import { el } from './dom.js'
import { closePopup, openPopup, place } from './popup.js'
import { parse, write } from './rows.js'
import { t } from './texts.js'

const FOLDER = 'graft_lora_presets'
const BAD = /[\\/:*?"<>|%\p{Cc}]|^\.|\.$/u
const LONGEST = 80
const fileOf = (name) => `${FOLDER}/${name}.json`

/** Names of all presets. */
async function names() {
  const found = await api.listUserDataFullInfo(FOLDER)
  const plain = found.map(({ path }) => path).filter((path) => /^[^\\/]+\.json$/.test(path))
  return plain.map((path) => path.slice(0, -5)).sort((one, other) => one.localeCompare(other))
}

async function read(name) {
  const response = await api.getUserData(fileOf(name))
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`)
  return parse(await response.text())
}

async function store(name, rows) {
  const options = { overwrite: true, stringify: false, throwOnError: true, full_info: false }
  await api.storeUserData(fileOf(name), write(rows), options)
}

async function remove(name) {
  const response = await api.deleteUserData(fileOf(name))
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`)
}

/** Open the list of presets below a button. `rows()` are the node's; `take(rows, added)` replaces them or adds to them. */
export async function openPresets(anchor, rows, take) {
  const message = el('div', { class: 'graft-note', role: 'alert', hidden: true })
  const list = el('div', { class: 'graft-preset-list' })
  const say = (text) => {
    message.textContent = text
    message.hidden = !text
  }
  const attempt = (name, act) => async () => {
    say('')
    try {
      await act()
    } catch (error) {
      say(t('Preset “{name}”: {error}', { name, error: error.message }))
    }
  }
  const use = (name, added) =>
    attempt(name, async () => {
      const found = await read(name)
      closePopup()
      take(found, added)
    })
  const draw = async () => {
    const found = await names()
    const lines = found.map((name) => line(name, use, attempt, draw))
    list.replaceChildren(...(lines.length ? lines : [el('div', { class: 'graft-dim' }, t('No presets yet.'))]))
  }
  const box = openPopup(
    at(anchor),
    { class: 'graft-presets', role: 'dialog', 'aria-label': t('Presets of LoRA rows') },
    list,
    saver(rows, say, attempt, draw),
    message,
  )
  await attempt('', draw)()
  place(box, at(anchor).x, at(anchor).y)
}

const at = (anchor) => ({ x: anchor.getBoundingClientRect().left, y: anchor.getBoundingClientRect().bottom + 2 })

/** A button that acts when it is pressed a second time. */
function twice(label, question, act, properties = {}) {
  let sure = false
  const button = el('button', { class: 'graft-button', type: 'button', ...properties }, label)
  button.addEventListener('click', () => {
    if (sure) act()
    else button.textContent = question
    sure = !sure
  })
  return button
}

function line(name, use, attempt, draw) {
  const removing = attempt(name, async () => {
    await remove(name)
    await draw()
  })
  return el(
    'div',
    { class: 'graft-line' },
    el(
      'button',
      { class: 'graft-button graft-preset', type: 'button', title: t('Replace the rows'), onclick: use(name, false) },
      name,
    ),
    el(
      'button',
      {
        class: 'graft-icon',
        type: 'button',
        title: t('Add to the rows'),
        'aria-label': t('Add to the rows'),
        onclick: use(name, true),
      },
      '+',
    ),
    twice('✕', t('Delete?'), removing, {
      class: 'graft-icon',
      title: t('Delete'),
      'aria-label': t('Delete {name}', { name }),
    }),
  )
}

/** The field and button that save the node's rows. A preset that cannot be read is never written over. */
function saver(rows, say, attempt, draw) {
  const input = el('input', {
    class: 'graft-text',
    type: 'text',
    placeholder: t('Name of a new preset'),
    'aria-label': t('Name of a new preset'),
    spellcheck: false,
  })
  let asked = null
  const save = async () => {
    const name = input.value.trim()
    if (!name || name.length > LONGEST || BAD.test(name)) {
      return say(t('A name has 1 to {most} characters, none of \\ / : * ? " < > | %', { most: LONGEST }))
    }
    const there = (await names()).includes(name)
    if (there) await read(name)
    if (there && asked !== name) {
      asked = name
      return say(t('“{name}” already exists. Press Save again to replace it.', { name }))
    }
    asked = null
    await store(name, rows())
    input.value = ''
    await draw()
  }
  const press = () => attempt(input.value.trim(), save)()
  input.addEventListener('keydown', (event) => event.key === 'Enter' && press())
  const button = el('button', { class: 'graft-button', type: 'button', onclick: press }, t('Save rows'))
  return el('div', { class: 'graft-line' }, input, button)
}
