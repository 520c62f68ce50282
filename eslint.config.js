/** How the editor's JavaScript is checked: `npm ci`, then `npm run lint`. */
import js from '@eslint/js'
import globals from 'globals'

export default [
  { ignores: ['**/*.md', '.venv/', 'build/', 'output/'] },
  js.configs.recommended,
  {
    files: ['web/**/*.js', 'tests/editor/*.js'],
    languageOptions: { ecmaVersion: 2023, sourceType: 'module', globals: globals.browser },
    linterOptions: { reportUnusedDisableDirectives: 'error' },
    rules: {
      complexity: ['error', 12],
      curly: ['error', 'multi-line'],
      eqeqeq: 'error',
      'no-eval': 'error',
      'no-implied-eval': 'error',
      'no-nested-ternary': 'error',
      'no-shadow': 'error',
      'no-var': 'error',
      'object-shorthand': 'error',
      'prefer-const': 'error',
      'prefer-template': 'error',
    },
  },
]
