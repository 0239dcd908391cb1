// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
)

// readKubernetes finds containers in any place of a manifest: in pods, in the templates of Deployments, StatefulSets
// and jobs, and in custom resources. It also reads ModelBooster workers, which have arguments and no containers.
func readKubernetes(docs []map[string]any) []launched {
	k := &manifests{configs: map[string]map[string]any{}}
	for _, doc := range docs {
		k.collect(doc)
	}
	for _, doc := range docs {
		k.walk(doc, "", "")
	}
	return k.list
}

type manifests struct {
	configs map[string]map[string]any // the ConfigMaps, by name
	list    []launched
}

func (k *manifests) collect(doc map[string]any) {
	if textAt(doc, "kind") == "ConfigMap" {
		k.configs[textAt(doc, "metadata", "name")] = mapAt(doc, "data")
	}
	for _, item := range listAt(doc, "items") {
		if m, ok := item.(map[string]any); ok {
			k.collect(m)
		}
	}
}

// walk looks for pod specs. name and kind are those of the surrounding object.
func (k *manifests) walk(v any, kind, name string) {
	switch v := v.(type) {
	case map[string]any:
		if own := textAt(v, "kind"); own != "" {
			kind = own
		}
		if own := cmp.Or(textAt(v, "metadata", "name"), textAt(v, "name")); own != "" &&
			(name == "" || kind == "List") {
			name = own
		}
		if containers := listAt(v, "containers"); containers != nil {
			k.pod(v, containers, name)
			return
		}
		if workers := listAt(v, "workers"); workers != nil && kind == "ModelBooster" {
			k.workers(v, workers, name)
			return
		}
		for _, key := range slices.Sorted(maps.Keys(v)) {
			inner := name
			if role := textAt(v, "name"); role != "" && name != role && mapAt(v, key) != nil && key != "metadata" {
				inner = name + "/" + role // a role in a custom resource
			}
			k.walk(v[key], kind, inner)
		}
	case []any:
		for _, item := range v {
			k.walk(item, kind, name)
		}
	}
}

func (k *manifests) pod(spec map[string]any, containers []any, name string) {
	for _, c := range containers {
		container, ok := c.(map[string]any)
		if !ok {
			continue
		}
		full := name
		if own := textAt(container, "name"); own != "" && len(containers) > 1 {
			full = name + "/" + own
		}
		l := launched{name: full, node: name, tag: tagOf(textAt(container, "image"))}
		if textAt(spec, "hostNetwork") == "true" {
			l.node = ""
		}
		l.env = k.env(container, name)
		command, given := kubeWords(at(container, "command"), l.env)
		args, _ := kubeWords(at(container, "args"), l.env)
		l.argv = withEntrypoint(textAt(container, "image"), command, given, args)
		l.read = func(file string) ([]byte, error) { return k.file(spec, container, file) }
		k.list = append(k.list, l.unwrap()...)
	}
}

// env reads a container's variables. A value that only the running pod knows becomes one that no other pod has.
func (k *manifests) env(container map[string]any, pod string) map[string]string {
	env := map[string]string{}
	for _, item := range listAt(container, "envFrom") {
		for key := range k.configs[textAt(item, "configMapRef", "name")] {
			env[key] = textAt(k.configs[textAt(item, "configMapRef", "name")], key)
		}
	}
	for _, item := range listAt(container, "env") {
		name := textAt(item, "name")
		switch {
		case at(item, "valueFrom", "fieldRef") != nil:
			env[name] = pod + "." + textAt(item, "valueFrom", "fieldRef", "fieldPath")
		case at(item, "valueFrom", "configMapKeyRef") != nil:
			ref := mapAt(item, "valueFrom", "configMapKeyRef")
			env[name] = textAt(k.configs[textAt(ref, "name")], textAt(ref, "key"))
		case at(item, "valueFrom") != nil:
			// a secret: nothing here needs one
		default:
			env[name] = kubeText(textAt(item, "value"), env)
		}
	}
	return env
}

// kubeText replaces $(NAME), and replaces $$ by one dollar sign.
func kubeText(s string, env map[string]string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '$' && i+1 < len(s) {
			if s[i+1] == '$' {
				b.WriteByte('$')
				i++
				continue
			}
			if end := strings.IndexByte(s[i:], ')'); s[i+1] == '(' && end > 0 {
				if value, ok := env[s[i+2:i+end]]; ok {
					b.WriteString(value)
					i += end
					continue
				}
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func kubeWords(v any, env map[string]string) (words []string, given bool) {
	list, given := v.([]any)
	for _, item := range list {
		words = append(words, kubeText(textAt(map[string]any{"": item}, ""), env))
	}
	return words, given
}

// file finds a container's file in the ConfigMaps that it mounts.
func (k *manifests) file(spec, container map[string]any, file string) ([]byte, error) {
	for _, mount := range listAt(container, "volumeMounts") {
		folder, key := textAt(mount, "mountPath"), textAt(mount, "subPath")
		if key == "" {
			if path.Dir(file) != path.Clean(folder) {
				continue
			}
			key = path.Base(file)
		} else if folder != file {
			continue
		}
		for _, volume := range listAt(spec, "volumes") {
			if textAt(volume, "name") != textAt(mount, "name") {
				continue
			}
			for _, item := range listAt(volume, "configMap", "items") {
				if textAt(item, "path") == key {
					key = textAt(item, "key")
					break
				}
			}
			if content, ok := k.configs[textAt(volume, "configMap", "name")][key].(string); ok {
				return []byte(content), nil
			}
		}
	}
	return nil, os.ErrNotExist
}

// workers reads a ModelBooster's backend. The config of each worker has vLLM's arguments by name.
func (k *manifests) workers(backend map[string]any, workers []any, name string) {
	shared := k.env(backend, name)
	for _, w := range workers {
		worker, ok := w.(map[string]any)
		if !ok {
			continue
		}
		full := name + "/" + textAt(worker, "type")
		env := maps.Clone(shared)
		maps.Copy(env, k.env(worker, full))
		argv := []string{"vllm", "serve", textAt(backend, "modelURI")}
		config := mapAt(worker, "config")
		for _, key := range slices.Sorted(maps.Keys(config)) {
			value := textAt(config, key)
			if raw, err := json.Marshal(config[key]); err == nil && value == "" {
				value = string(raw)
			}
			argv = append(argv, fmt.Sprintf("--%s=%s", key, strings.TrimSpace(value)))
		}
		k.list = append(k.list,
			launched{name: full, node: full, argv: argv, env: env, tag: tagOf(textAt(worker, "image"))})
	}
}
