// SPDX-License-Identifier: Apache-2.0

// Package launch says with which settings engines must be started, and writes them as programs that start the engines:
// a shell script, a Docker Compose file, Kubernetes manifests, or Python that makes the engines offline.
//
// Each connector of pdkit has a function here that renders its engines' settings; one of elsewhere may be a
// [Launcher], or [Register] a function. [Model] calls it for each engine of a deployment:
//
//	plan, err := launch.Model(launch.Deployment{Spec: spec, Endpoints: endpoints, Model: "llama2-7b"})
//	os.Stdout.Write(plan.Shell())
//
// The output is complete for the KV transfer: arguments, environment, configuration files and the programs that must
// run beside the engines. The reader adds what else an engine needs: memory, parallelism, credentials. Comments name
// the settings without effect. The same plan always gives the same bytes.
package launch

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
)

// Deployment is one model and its engines.
type Deployment struct {
	Spec      config.Spec
	Endpoints []discovery.Endpoint
	Model     string  // the name that requests use
	Path      string  // what the engines load: a hub's name or a folder; "" is Model
	Name      string  // of the deployment, for Kubernetes; "" is made from Model
	Version   Version // of all engines; the zero value is the newest that the connector knows
	Gateway   string  // see [Target.Gateway]
	CPU       bool
}

// Engine is one engine with its settings.
type Engine struct {
	Name     string // prefill-0, decode-1, both-0: by role and index
	Target   Target
	Settings Settings
	Labels   map[string]string // of its Kubernetes pod; free to be set
}

// Plan holds all programs to start for one model.
type Plan struct {
	Name    string // a DNS label
	Path    string // what the engines load
	Image   string // container image; "" is the engine's own one, of the engine's version
	Engines []Engine
	// Companions are the programs that run once, beside all engines. Those of each engine stay in its settings.
	Companions []Companion
	Notes      []Note // those that every engine has
}

// Model opens the connector of a deployment and renders the settings of all its engines. It leaves engines of role
// encode out, since a connector that [connector.Open] knows has no encode stage. The error is that of [connector.Open]
// or of [Render].
func Model(d Deployment) (*Plan, error) {
	c, err := connector.Open(d.Spec)
	if err != nil {
		return nil, err
	}
	return With(c, d)
}

// With is [Model] for a connector that was made of the deployment's Spec already. It renders engines of role encode
// too, where the connector has an encode stage (package epd).
func With(c connector.KVConnector, d Deployment) (*Plan, error) {
	if rendererOf(c) == nil {
		return nil, fmt.Errorf("connector %s: %w", c.Traits().Name, ErrNoSettings)
	}
	p := &Plan{Name: Label(d.Name), Path: d.Path}
	if d.Name == "" {
		p.Name = Label(d.Model)
	}
	if p.Path == "" {
		p.Path = d.Model
	}
	serving := slices.DeleteFunc(slices.Clone(d.Endpoints),
		func(e discovery.Endpoint) bool { return e.Role == discovery.RoleEncode })
	index := map[discovery.Role]int{}
	rendered := serving
	if _, encodes := connector.As[connector.Encoder](c); encodes {
		rendered = d.Endpoints
	}
	for _, e := range rendered {
		t := Target{
			Endpoint: e, Index: index[e.Role], Engines: serving, Model: d.Model,
			Version: d.Version, Resources: d.Spec.Resources, Gateway: d.Gateway, CPU: d.CPU,
		}
		index[e.Role]++
		name := fmt.Sprintf("%s-%d", e.Role, t.Index)
		s, err := Render(c, d.Spec.Config, t)
		if err != nil {
			return nil, fmt.Errorf("engine %s: %w", name, err)
		}
		if err := check(s); err != nil {
			return nil, fmt.Errorf("engine %s: %w", name, err)
		}
		p.Engines = append(p.Engines, Engine{Name: name, Target: t, Settings: s})
	}
	p.gather()
	if err := p.sameFiles(); err != nil {
		return nil, err
	}
	return p, nil
}

// Idle returns a note for each setting that has no effect in any engine of a deployment. A setting that only P or only
// D reads has one. A connector without launch settings has no such
// notes.
func Idle(c connector.KVConnector, d Deployment) []Note {
	var without []Note
	used := map[string]bool{}
	for i, e := range d.Endpoints {
		set, err := Render(c, d.Spec.Config, Target{Endpoint: e, Index: i, Engines: d.Endpoints, Model: d.Model,
			Resources: d.Spec.Resources})
		if err != nil {
			continue // no engine of today can be launched so, which pdctl render tells; those that run are served
		}
		here := map[string]bool{}
		for _, n := range set.Notes {
			if n.NoEffect {
				here[n.Path] = true
				without = append(without, n)
			}
		}
		for _, n := range set.Notes {
			used[n.Path] = used[n.Path] || !here[n.Path]
		}
	}
	return slices.DeleteFunc(without, func(n Note) bool {
		told := used[n.Path]
		used[n.Path] = true
		return told
	})
}

// sameFiles refuses two files of one name with different content: the files of all engines lie in one folder.
func (p *Plan) sameFiles() error {
	content := map[string]string{}
	for _, e := range p.Engines {
		for _, f := range e.Settings.Files {
			if other, known := content[f.Name]; known && other != f.Content {
				return fmt.Errorf("engine %s: file %s has another content than that of another engine", e.Name, f.Name)
			}
			content[f.Name] = f.Content
		}
	}
	return nil
}

// gather moves what all engines share to the plan: companions that run once, and notes that every engine has.
func (p *Plan) gather() {
	for i := range p.Engines {
		s := &p.Engines[i].Settings
		own := make([]Companion, 0, len(s.Companions))
		for _, c := range s.Companions {
			switch known := slices.ContainsFunc(p.Companions, func(k Companion) bool { return k.Name == c.Name }); {
			case c.PerEngine:
				own = append(own, c)
			case !known:
				p.Companions = append(p.Companions, c)
			}
		}
		s.Companions = own
	}
	if len(p.Engines) == 0 {
		return
	}
	for _, n := range p.Engines[0].Settings.Notes {
		if !slices.ContainsFunc(p.Engines, func(e Engine) bool { return !slices.Contains(e.Settings.Notes, n) }) {
			p.Notes = append(p.Notes, n)
		}
	}
	for i := range p.Engines {
		s := &p.Engines[i].Settings
		s.Notes = slices.DeleteFunc(slices.Clone(s.Notes),
			func(n Note) bool { return slices.Contains(p.Notes, n) })
	}
}

var (
	envName  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	fileName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]*$`)
	notLabel = regexp.MustCompile(`[^a-z0-9]+`)
)

// check refuses settings that one of the forms cannot hold.
func check(s Settings) error {
	for _, e := range s.Env {
		if !envName.MatchString(e.Name) {
			return fmt.Errorf("%q is not a name for an environment variable", e.Name)
		}
	}
	for _, f := range s.Files {
		if !fileName.MatchString(f.Name) {
			return fmt.Errorf("%q is not a plain file name", f.Name)
		}
	}
	texts := slices.Clone(s.Args)
	for _, e := range s.Env {
		texts = append(texts, e.Value)
	}
	for _, c := range s.Companions {
		if len(c.Command) == 0 || Label(c.Name) != c.Name {
			return fmt.Errorf("companion %q has no command, or a name that is not a DNS label", c.Name)
		}
		texts = append(texts, c.Command...)
	}
	if slices.ContainsFunc(texts, func(t string) bool { return strings.ContainsRune(t, 0) }) {
		return errors.New("an argument or an environment variable holds a zero byte")
	}
	return nil
}

// Label makes a DNS label of a name, as [Plan.Name] is one.
func Label(s string) string {
	s = strings.Trim(notLabel.ReplaceAllString(strings.ToLower(s), "-"), "-")
	s = strings.TrimRight(s[:min(len(s), 40)], "-")
	if s == "" {
		return "model"
	}
	return s
}

// files returns all configuration files by name, in the order of the engines.
func (p *Plan) files() []File {
	var all []File
	for _, e := range p.Engines {
		for _, f := range e.Settings.Files {
			if !slices.ContainsFunc(all, func(k File) bool { return k.Name == f.Name }) {
				all = append(all, f)
			}
		}
	}
	return all
}

// sortedLabels returns a pod's labels in a stable order.
func sortedLabels(m map[string]string) []EnvVar {
	var list []EnvVar
	for _, k := range slices.Sorted(maps.Keys(m)) {
		list = append(list, EnvVar{Name: k, Value: m[k]})
	}
	return list
}
