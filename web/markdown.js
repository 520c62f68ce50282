/** The Markdown that the help bases are written in, as elements: headings, paragraphs, lists, tables, code, links, pictures. */
import { el } from './dom.js'

const INLINE = /`([^`]+)`|\*\*(.+?)\*\*|\*(.+?)\*|!\[([^\]]*)\]\(([^)]*)\)|\[([^\]]*)\]\(([^)]*)\)/
const HEADING = /^(#{1,6}) (.*)$/
const ITEM = /^(- |\d+\. )(.*)$/
const FENCE = /^```/

/** A line of text as nodes; addresses of links stay as they are, those of pictures are relative to `base`. */
function inline(text, base) {
  const found = text.match(INLINE)
  if (!found) return [text]
  const [whole, code, bold, italic, alt, picture, label, address] = found
  const rest = inline(text.slice(found.index + whole.length), base)
  const before = text.slice(0, found.index)
  let element = el('a', { href: address }, ...inline(label ?? '', base))
  if (code !== undefined) element = el('code', {}, code)
  else if (bold !== undefined) element = el('strong', {}, ...inline(bold, base))
  else if (italic !== undefined) element = el('em', {}, ...inline(italic, base))
  else if (picture !== undefined) element = el('img', { src: new URL(picture, base).href, alt })
  return [before, element, ...rest]
}

function table(lines, base) {
  const cellsOf = (line) => line.split(/(?<!\\)\|/).slice(1, -1)
  const rowOf = (line, tag) =>
    el('tr', {}, ...cellsOf(line).map((cell) => el(tag, {}, ...inline(cell.trim().replaceAll('\\|', '|'), base))))
  const [head, , ...rows] = lines
  return el('table', {}, el('thead', {}, rowOf(head, 'th')), el('tbody', {}, ...rows.map((row) => rowOf(row, 'td'))))
}

function list(lines, base) {
  const items = []
  for (const line of lines) {
    const item = line.match(ITEM)
    if (item) items.push(item[2])
    else items.push(`${items.pop()} ${line.trim()}`)
  }
  const tag = lines[0].startsWith('-') ? 'ul' : 'ol'
  return el(tag, {}, ...items.map((item) => el('li', {}, ...inline(item, base))))
}

/** Elements of a Markdown text; its pictures lie below the address `base`. */
export function elementsOf(text, base) {
  const lines = text.split(/\r?\n/)
  const elements = []
  const takeWhile = (belongs) => {
    const taken = [lines.shift()]
    while (lines.length && belongs(lines[0])) taken.push(lines.shift())
    return taken
  }
  const isItem = (line) => ITEM.test(line) || /^\s+\S/.test(line) // or goes on with one
  const isRow = (line) => line.startsWith('|')
  const isText = (line) => line.trim() && ![HEADING, ITEM, FENCE].some((one) => one.test(line)) && !isRow(line)
  while (lines.length) {
    const [line] = lines
    const heading = line.match(HEADING)
    if (heading) {
      lines.shift()
      elements.push(el(`h${heading[1].length}`, {}, ...inline(heading[2], base)))
    } else if (FENCE.test(line)) {
      const [, ...code] = takeWhile((next) => !FENCE.test(next))
      lines.shift()
      elements.push(el('pre', {}, el('code', {}, code.join('\n'))))
    } else if (isRow(line)) elements.push(table(takeWhile(isRow), base))
    else if (ITEM.test(line)) elements.push(list(takeWhile(isItem), base))
    else if (line.trim()) elements.push(el('p', {}, ...inline(takeWhile(isText).join(' '), base)))
    else lines.shift()
  }
  return elements
}
