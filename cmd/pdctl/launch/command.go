// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
)

// process is one program to start, for all forms but Python.
type process struct {
	name  string
	env   []EnvVar
	argv  []string
	files []File
	notes []Note
}

// where says how a form names things: the folder of the files, and the text that stands for the engine's own address.
type where struct {
	folder  string // "" is the working directory
	anyHost bool   // engines listen on all addresses of their container
	ownHost string // what stands for the engine's own host, "" leaves it
}

// process returns the command that starts an engine.
func (p *Plan) process(e *Engine, w where) process {
	s := &e.Settings
	argv := p.program(e, w)
	if s.KVTransfer != nil {
		t := *s.KVTransfer
		t.Extra, _ = w.rewrite(e, t.Extra).(map[string]any)
		if w.isOwn(e, t.IP) {
			t.IP = w.ownHost
		}
		argv = append(argv, "--kv-transfer-config", t.JSON())
	}
	argv = append(argv, each(s.Args, func(a string) string { return w.value(e, a) })...)
	env := slices.Clone(s.Env)
	for i := range env {
		env[i].Value = w.value(e, env[i].Value)
	}
	return process{name: e.Name, env: env, argv: argv, files: s.Files, notes: s.Notes}
}

// program returns the engine's own command up to its address. It leaves out arguments that the connector gives.
func (p *Plan) program(e *Engine, w where) []string {
	s := &e.Settings
	has := func(flag string) bool {
		return slices.ContainsFunc(s.Args, func(a string) bool { return a == flag || strings.HasPrefix(a, flag+"=") })
	}
	var argv []string
	switch s.Engine {
	case "sglang":
		argv = []string{"python3", "-m", "sglang.launch_server", "--model-path", p.Path}
	case "trtllm":
		argv = []string{"trtllm-serve", "serve", p.Path}
	default:
		argv = []string{"vllm", "serve", p.Path}
	}
	if m := e.Target.Model; m != p.Path && m != "" && m != "*" && s.Engine != "trtllm" && !has("--served-model-name") {
		argv = append(argv, "--served-model-name", m)
	}
	if !has("--host") {
		argv = append(argv, "--host", w.listen(e))
	}
	if !has("--port") {
		argv = append(argv, "--port", portOf(e.Target.Endpoint))
	}
	return argv
}

// listen returns the address that an engine binds. It never returns a name, which may resolve to an address outside the
// engine's machine.
func (w where) listen(e *Engine) string {
	host := e.Target.Endpoint.Host()
	if _, err := netip.ParseAddr(host); err == nil && !w.anyHost {
		return host
	}
	if strings.EqualFold(host, "localhost") && !w.anyHost {
		return "127.0.0.1"
	}
	return "0.0.0.0"
}

func (w where) isOwn(e *Engine, s string) bool {
	return w.ownHost != "" && s != "" && s == e.Target.Endpoint.Host()
}

// value rewrites an argument or a variable: the name of a file becomes its path, and the engine's own host becomes
// ownHost. It rewrites whole values and what follows the "=" of a flag, nothing else.
func (w where) value(e *Engine, s string) string {
	head, tail := "", s
	if flag, v, ok := strings.Cut(s, "="); ok && strings.HasPrefix(s, "--") {
		head, tail = flag+"=", v
	}
	if w.folder != "" && slices.ContainsFunc(e.Settings.Files, func(f File) bool { return f.Name == tail }) {
		return head + w.folder + "/" + tail
	}
	if w.isOwn(e, tail) {
		return head + w.ownHost
	}
	if host, rest, ok := strings.Cut(tail, ":"); ok && w.isOwn(e, host) {
		return head + w.ownHost + ":" + rest
	}
	return s
}

// rewrite applies value to all texts in a connector's settings.
func (w where) rewrite(e *Engine, v any) any {
	switch v := v.(type) {
	case string:
		return w.value(e, v)
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, item := range v {
			out[k] = w.rewrite(e, item)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, item := range v {
			out[i] = w.rewrite(e, item)
		}
		return out
	case nil, bool, int, int64, float64, json.Number:
		return v
	}
	// A Func may use typed lists and structs: the engine sees their JSON.
	raw, err := json.Marshal(v)
	if err != nil {
		return v
	}
	var plain any
	dec := json.NewDecoder(strings.NewReader(string(raw)))
	dec.UseNumber()
	if dec.Decode(&plain) != nil {
		return v
	}
	switch plain.(type) {
	case string, map[string]any, []any:
		return w.rewrite(e, plain)
	}
	return plain
}

// companion returns the command of a program beside the engines; e is its engine, nil for one that runs once.
func (w where) companion(c Companion, e *Engine) process {
	pr := process{name: c.Name, argv: c.Command}
	if e != nil {
		pr.name = e.Name + "-" + c.Name
		pr.argv = each(c.Command, func(a string) string { return w.value(e, a) })
	}
	return pr
}

// image returns the container image of an engine. It does not guess images for CPUs, whose names differ by registry.
func (p *Plan) image(e *Engine) string {
	tag := "latest"
	name := "vllm/vllm-openai"
	if v := e.Target.Version.String(); v != "" {
		tag = "v" + v
	}
	switch e.Settings.Engine {
	case "sglang":
		name = "lmsysorg/sglang"
	case "trtllm":
		name, tag = "nvcr.io/nvidia/tensorrt-llm/release", strings.TrimPrefix(tag, "v")
	}
	return cmp.Or(p.Image, name+":"+tag)
}

// noteLines returns one line of text for each note.
func noteLines(notes []Note) []string {
	var lines []string
	for _, n := range notes {
		head := n.Path
		switch {
		case n.NoEffect && head != "":
			head += " has no effect: "
		case n.NoEffect:
			head = "without effect: "
		case head != "":
			head += ": "
		}
		lines = append(lines, strings.Join(strings.Fields(head+n.Text), " "))
	}
	return lines
}
