"""Write the JSON Schemas of both TOML files beside this script. A test holds them current."""

import json
from pathlib import Path

from rrd import config, job

for name, schema in (("job", job.json_schema()), ("rrd", config.json_schema())):
    text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    Path(__file__).with_name(f"{name}.schema.json").write_text(text, encoding="utf-8")
