// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// ErrNoPython is the error for an engine that Python cannot make from arguments: TensorRT-LLM reads its settings from
// files.
var ErrNoPython = errors.New("engine is not made from Python arguments")

// Python writes a module with one function per engine. The function makes the engine offline, without a server: vLLM's
// LLM with its KVTransferConfig, or SGLang's Engine. Run with an engine's name, the module makes that one. It leaves
// out arguments of servers, and names them in a comment.
func (p *Plan) Python() ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# The engines of %s, made offline: `python3 -i FILE NAME` makes one of them, `llm` is its "+
		"name then.\n", comment(p.Name))
	writeComments(&b, "", noteLines(p.Notes))
	for _, c := range p.Companions {
		writeComments(&b, "", []string{"Runs beside them: " + words(where{}.companion(c, nil).argv)})
	}
	b.WriteString("import os\nimport sys\nfrom pathlib import Path\n\n\n")
	b.WriteString(pythonEnviron)
	for i := range p.Engines {
		if err := p.pythonEngine(&b, &p.Engines[i]); err != nil {
			return nil, err
		}
	}
	b.WriteString("\n\nENGINES = {\n")
	for _, e := range p.Engines {
		fmt.Fprintf(&b, "    %s: %s,\n", quoted(e.Name), identifier(e.Name))
	}
	b.WriteString("}\n\nif __name__ == \"__main__\":\n    if len(sys.argv) != 2 or sys.argv[1] not in ENGINES:\n" +
		"        sys.exit(\"usage: FILE \" + \"|\".join(ENGINES))\n    llm = ENGINES[sys.argv[1]]()\n")
	return b.Bytes(), nil
}

// Python reads PYTHONHASHSEED when it starts, and libraries read other variables when they are loaded. So the program
// sets them and starts again.
const pythonEnviron = `def environ(wanted):
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
`

func (p *Plan) pythonEngine(b *bytes.Buffer, e *Engine) error {
	s := &e.Settings
	if s.Engine == "trtllm" {
		return fmt.Errorf("engine %s: %w", e.Name, ErrNoPython)
	}
	fmt.Fprintf(b, "\n\ndef %s():\n", identifier(e.Name))
	writeComments(b, "    ", noteLines(s.Notes))
	for _, c := range s.Companions {
		writeComments(b, "    ", []string{"Runs beside it: " + words(where{}.companion(c, e).argv)})
	}
	if len(s.Env) > 0 {
		b.WriteString("    environ({\n")
		for _, v := range s.Env {
			fmt.Fprintf(b, "        %s: %s,\n", quoted(v.Name), quoted(v.Value))
		}
		b.WriteString("    })\n")
	}
	for _, f := range s.Files {
		fmt.Fprintf(b, "    Path(%s).write_text(%s, encoding=\"utf-8\")\n", quoted(f.Name), quoted(f.Content))
	}
	kwargs, left := keywords(s.Args)
	writeComments(b, "    ", left)
	if s.Engine == "sglang" {
		fmt.Fprintf(b, "    from sglang import Engine\n\n    return Engine(\n        model_path=%s,\n", quoted(p.Path))
	} else {
		b.WriteString("    from vllm import LLM\n    from vllm.config import KVTransferConfig\n\n")
		fmt.Fprintf(b, "    return LLM(\n        model=%s,\n", quoted(p.Path))
		if s.KVTransfer != nil {
			if err := pythonTransfer(b, s.KVTransfer); err != nil {
				return fmt.Errorf("engine %s: %w", e.Name, err)
			}
		}
	}
	for _, k := range kwargs {
		fmt.Fprintf(b, "        %s=%s,\n", k.Name, k.Value)
	}
	b.WriteString("    )\n")
	return nil
}

// pythonTransfer writes the configuration member by member, in its JSON order.
func pythonTransfer(b *bytes.Buffer, t *KVTransfer) error {
	dec := json.NewDecoder(strings.NewReader(t.JSON()))
	dec.UseNumber()
	if tok, err := dec.Token(); err != nil || tok != json.Delim('{') {
		return errors.New("its KV transfer settings have no JSON form")
	}
	b.WriteString("        kv_transfer_config=KVTransferConfig(\n")
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return err
		}
		var v any
		if err := dec.Decode(&v); err != nil {
			return err
		}
		fmt.Fprintf(b, "            %s=%s,\n", key, literal(v, "            "))
	}
	b.WriteString("        ),\n")
	return nil
}

// literal writes a JSON value as Python does.
func literal(v any, indent string) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case bool:
		if v {
			return "True"
		}
		return "False"
	case json.Number:
		return v.String()
	case string:
		return quoted(v)
	case []any:
		parts := make([]string, len(v))
		nested := false
		for i, item := range v {
			parts[i] = literal(item, indent+"    ")
			_, isMap := item.(map[string]any)
			nested = nested || isMap
		}
		if nested {
			return "[\n" + indent + "    " + strings.Join(parts, ",\n"+indent+"    ") + ",\n" + indent + "]"
		}
		return "[" + strings.Join(parts, ", ") + "]"
	case map[string]any:
		if len(v) == 0 {
			return "{}"
		}
		var b strings.Builder
		b.WriteString("{\n")
		for _, k := range slices.Sorted(maps.Keys(v)) {
			fmt.Fprintf(&b, "%s    %s: %s,\n", indent, quoted(k), literal(v[k], indent+"    "))
		}
		return b.String() + indent + "}"
	}
	return "None"
}

// onlyServers are arguments that an engine without a server does not know.
var onlyServers = []string{"host", "port", "served_model_name", "enable_prompt_tokens_details",
	"enable_request_id_headers", "enable_scale_out",
	"enable_force_include_usage", "api_key", "tokens_only", "return_tokens_as_token_ids", "enable_server_load_tracking"}

// keywords turns the arguments of a command line into those of a constructor: --block-size 32 becomes block_size=32.
// left names those that it leaves out.
func keywords(args []string) (kwargs []EnvVar, left []string) {
	for i := 0; i < len(args); i++ {
		flag, isFlag := strings.CutPrefix(args[i], "--")
		if !isFlag {
			left = append(left, "left out: "+args[i])
			continue
		}
		name, value, given := strings.Cut(flag, "=")
		if !given && i+1 < len(args) && !strings.HasPrefix(args[i+1], "--") {
			i++
			value, given = args[i], true
		}
		name = strings.ReplaceAll(name, "-", "_")
		switch {
		case slices.Contains(onlyServers, name):
			left = append(left, "for servers alone: --"+strings.ReplaceAll(name, "_", "-"))
			continue
		case !envName.MatchString(name):
			left = append(left, "left out: --"+name)
			continue
		}
		text := "True"
		if given {
			text = pythonValue(value)
		} else if positive, no := strings.CutPrefix(name, "no_"); no {
			name, text = positive, "False"
		}
		kwargs = append(kwargs, EnvVar{Name: name, Value: text})
	}
	return kwargs, left
}

// pythonValue writes an argument's value: as a number or an object where the value is one in JSON, else as a text.
func pythonValue(s string) string {
	dec := json.NewDecoder(strings.NewReader(s))
	dec.UseNumber()
	var v any
	if dec.Decode(&v) != nil || dec.More() {
		return quoted(s)
	}
	switch v.(type) {
	case json.Number, map[string]any, []any:
		return literal(v, "        ")
	}
	return quoted(s)
}

func identifier(name string) string { return strings.ReplaceAll(name, "-", "_") }

// words writes a command as a shell would take it.
func words(argv []string) string {
	return strings.Join(each(argv, shellQuote), " ")
}
