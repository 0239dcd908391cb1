// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"bytes"
	"encoding/json"
)

// JSON returns the programs to start, for other programs:
//
//	{"name": "tiny", "notes": ["…"], "programs": [{"name": "prefill-0", "argv": ["vllm", "serve", …],
//	 "env": {"NAME": "VALUE"}, "files": {"NAME": "CONTENT"}, "notes": ["…"]}]}
//
// Companions come before the engines that need them. Files belong into the programs' working directory. Members
// without content are left out.
func (p *Plan) JSON() ([]byte, error) {
	type program struct {
		Name  string            `json:"name"`
		Argv  []string          `json:"argv"`
		Env   map[string]string `json:"env,omitempty"`
		Files map[string]string `json:"files,omitempty"`
		Notes []string          `json:"notes,omitempty"`
	}
	plan := struct {
		Name     string    `json:"name"`
		Notes    []string  `json:"notes,omitempty"`
		Programs []program `json:"programs"`
	}{Name: p.Name, Notes: noteLines(p.Notes)}
	for _, pr := range p.processes() {
		one := program{Name: pr.name, Argv: pr.argv, Env: map[string]string{}, Files: map[string]string{},
			Notes: noteLines(pr.notes)}
		for _, v := range pr.env {
			one.Env[v.Name] = v.Value
		}
		for _, f := range pr.files {
			one.Files[f.Name] = f.Content
		}
		plan.Programs = append(plan.Programs, one)
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	err := e.Encode(plan)
	return b.Bytes(), err
}
