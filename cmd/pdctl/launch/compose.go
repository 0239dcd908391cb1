// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"bytes"
	"fmt"
)

// configFolder is where containers find their configuration files.
const configFolder = "/etc/pdkit"

// Compose writes a Docker Compose file with one service per engine and companion. Services use the host's network, so
// that the endpoints' addresses hold: write one file per host where engines run on several. Files with content need
// Docker Compose 2.23.1.
func (p *Plan) Compose() []byte {
	w := where{folder: configFolder}
	var b bytes.Buffer
	fmt.Fprintf(&b, "# The engines of %s. Devices, volumes and credentials are yours to add.\n", comment(p.Name))
	writeComments(&b, "", noteLines(p.Notes))
	b.WriteString("services:\n")
	for _, c := range p.Companions {
		p.composeService(&b, w.companion(c, nil), p.companionImage(), nil)
	}
	for i := range p.Engines {
		e := &p.Engines[i]
		for _, c := range e.Settings.Companions {
			p.composeService(&b, w.companion(c, e), p.image(e), e.Settings.Files)
		}
		p.composeService(&b, p.process(e, w), p.image(e), e.Settings.Files)
	}
	if files := p.files(); len(files) > 0 {
		b.WriteString("configs:\n")
		for _, f := range files {
			fmt.Fprintf(&b, "  %s:\n", scalar(f.Name))
			yamlText(&b, "    ", "content", escapeDollars(f.Content))
		}
	}
	return b.Bytes()
}

func (p *Plan) composeService(b *bytes.Buffer, pr process, image string, files []File) {
	fmt.Fprintf(b, "  %s:\n", pr.name)
	writeComments(b, "    ", noteLines(pr.notes))
	fmt.Fprintf(b, "    image: %s\n    network_mode: host\n    ipc: host\n", scalar(escapeDollars(image)))
	yamlList(b, "    ", "entrypoint", each(pr.argv[:1], escapeDollars))
	yamlList(b, "    ", "command", each(pr.argv[1:], escapeDollars))
	env := make([]EnvVar, len(pr.env))
	for i, e := range pr.env {
		env[i] = EnvVar{Name: e.Name, Value: escapeDollars(e.Value)}
	}
	yamlMap(b, "    ", "environment", env)
	if len(files) > 0 {
		b.WriteString("    configs:\n")
		for _, f := range files {
			fmt.Fprintf(b, "      - source: %s\n        target: %s\n", scalar(f.Name), scalar(configFolder+"/"+f.Name))
		}
	}
}

// companionImage returns the image of the first engine, since companions are programs of the engine's own packages.
func (p *Plan) companionImage() string {
	if len(p.Engines) == 0 {
		return p.Image
	}
	return p.image(&p.Engines[0])
}
