// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// podIP stands for a pod's own address. An engine binds and announces its side channel with one value, so that the name
// of a service cannot stand there.
const podIP = "$(POD_IP)"

// modelLabel marks all pods of one plan.
const modelLabel = "pdkit.dev/model"

// Kubernetes writes one pod per engine and companion, and a ConfigMap for their files. Copy the container into a
// Deployment or StatefulSet. Where an endpoint's host is the pod's name under the plan's (prefill-0.llama2-7b),
// Kubernetes also writes the headless Service that makes the name resolve. An engine's own host becomes the pod's
// address, but not inside files.
func (p *Plan) Kubernetes() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# The engines of %s. Devices, volumes and credentials are yours to add.\n", comment(p.Name))
	writeComments(&b, "", noteLines(p.Notes))
	if files := p.files(); len(files) > 0 {
		fmt.Fprintf(&b, "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: %s\ndata:\n", scalar(p.Name))
		for _, f := range files {
			yamlText(&b, "  ", scalar(f.Name), f.Content)
		}
		b.WriteString("---\n")
	}
	if len(p.Companions) > 0 || slices.ContainsFunc(p.Engines, func(e Engine) bool { return p.named(&e) }) {
		fmt.Fprintf(&b, "apiVersion: v1\nkind: Service\nmetadata:\n  name: %s\nspec:\n  clusterIP: None\n  "+
			"publishNotReadyAddresses: true\n", scalar(p.Name))
		yamlMap(&b, "  ", "selector", []EnvVar{{Name: modelLabel, Value: p.Name}})
		b.WriteString("---\n")
	}
	w := where{folder: configFolder, anyHost: true, ownHost: podIP}
	for i, c := range p.Companions {
		if i > 0 {
			b.WriteString("---\n")
		}
		p.podHead(&b, c.Name, nil, true)
		p.container(&b, w.companion(c, nil), p.companionImage(), "", nil)
	}
	for i := range p.Engines {
		if i > 0 || len(p.Companions) > 0 {
			b.WriteString("---\n")
		}
		p.pod(&b, &p.Engines[i], w)
	}
	return b.Bytes()
}

// named reports whether an engine's host is its pod's name under the plan's Service.
func (p *Plan) named(e *Engine) bool { return e.Target.Endpoint.Host() == e.Name+"."+p.Name }

func (p *Plan) pod(b *bytes.Buffer, e *Engine, w where) {
	p.podHead(b, e.Name, e.Labels, p.named(e))
	p.container(b, p.process(e, w), p.image(e), portOf(e.Target.Endpoint), e.Settings.Files)
	for _, c := range e.Settings.Companions {
		p.container(b, w.companion(c, e), p.image(e), "", e.Settings.Files)
	}
	if len(e.Settings.Files) > 0 {
		fmt.Fprintf(b, "  volumes:\n    - name: config\n      configMap:\n        name: %s\n", scalar(p.Name))
	}
}

func (p *Plan) podHead(b *bytes.Buffer, name string, labels map[string]string, named bool) {
	all := map[string]string{modelLabel: p.Name}
	maps.Copy(all, labels)
	fmt.Fprintf(b, "apiVersion: v1\nkind: Pod\nmetadata:\n  name: %s\n", scalar(p.Name+"-"+name))
	yamlMap(b, "  ", "labels", sortedLabels(all))
	b.WriteString("spec:\n")
	if named {
		fmt.Fprintf(b, "  hostname: %s\n  subdomain: %s\n", scalar(name), scalar(p.Name))
	}
	b.WriteString("  containers:\n")
}

func (p *Plan) container(b *bytes.Buffer, pr process, image, containerPort string, files []File) {
	fmt.Fprintf(b, "    - name: %s\n", scalar(pr.name))
	writeComments(b, "      ", noteLines(pr.notes))
	fmt.Fprintf(b, "      image: %s\n", scalar(image))
	yamlList(b, "      ", "command", each(pr.argv[:1], kube))
	yamlList(b, "      ", "args", each(pr.argv[1:], kube))
	if containerPort != "" {
		fmt.Fprintf(b, "      ports:\n        - containerPort: %s\n", containerPort)
	}
	usesIP := slices.ContainsFunc(pr.argv, hasIP) ||
		slices.ContainsFunc(pr.env, func(e EnvVar) bool { return hasIP(e.Value) })
	if usesIP || len(pr.env) > 0 {
		b.WriteString("      env:\n")
	}
	if usesIP { // first: a variable can only name those before it
		b.WriteString("        - name: POD_IP\n          valueFrom:\n            fieldRef:\n              fieldPath: " +
			"status.podIP\n")
	}
	for _, e := range pr.env {
		fmt.Fprintf(b, "        - name: %s\n          value: %s\n", e.Name, scalar(kube(e.Value)))
	}
	if len(files) > 0 {
		fmt.Fprintf(b, "      volumeMounts:\n        - name: config\n          mountPath: %s\n          "+
			"readOnly: true\n", configFolder)
	}
}

func hasIP(s string) bool { return strings.Contains(s, podIP) }

// kube keeps Kubernetes from replacing anything but the pod's address.
func kube(s string) string {
	return strings.ReplaceAll(escapeDollars(s), escapeDollars(podIP), podIP)
}
