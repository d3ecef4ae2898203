/** Writes docs/configuration.md from the schema: `node scripts/docs.ts > docs/configuration.md`. A test holds them equal. */
import { configurationDoc } from '../test/support/configuration-doc.ts'

process.stdout.write(configurationDoc())
