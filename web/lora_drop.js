/** LoRA files that are dropped onto a node: stored in the loras folder if they are new, and chosen. */
import { asked } from './editor.js'
import { hasFiles, size } from './dom.js'
import { t } from './texts.js'

/** Take the files that are dropped onto a node or its panel; `take` is called with them. */
export function dropFiles(node, element, take) {
  element.addEventListener('dragover', (event) => {
    if (!hasFiles(event)) return
    event.preventDefault()
    event.stopPropagation()
    element.classList.add('graft-dropping')
  })
  element.addEventListener('dragleave', (event) => {
    if (!element.contains(event.relatedTarget)) element.classList.remove('graft-dropping')
  })
  element.addEventListener('drop', (event) => {
    element.classList.remove('graft-dropping')
    if (!hasFiles(event)) return
    event.preventDefault()
    event.stopPropagation()
    take([...event.dataTransfer.files])
  })
  node.onDragOver = hasFiles
  node.onDragDrop = (event) => {
    if (!hasFiles(event)) return false
    take([...event.dataTransfer.files])
    return true
  }
}

/** Bring a file to the loras folder; its name there. An Error says why not. */
export async function bring(file, say) {
  if (!/\.safetensors$/i.test(file.name)) {
    throw new Error(t('“{file}” is not a LoRA: drop a .safetensors file', { file: file.name }))
  }
  const name = encodeURIComponent(file.name)
  await asked(`/graft/lora_upload?name=${name}&size=${file.size}`)
  say(t('Copying {file}, {size} …', { file: file.name, size: size(file.size) }))
  const stored = await asked(`/graft/lora_upload?name=${name}`, {
    method: 'POST',
    headers: { 'Content-Type': 'application/octet-stream' },
    body: file,
  })
  return stored.name
}
