// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/discovery"
)

type renderCmd struct {
	File          string   `short:"f" required:"" placeholder:"FILE" help:"${render_file}"`
	Format        string   `enum:"shell,compose,kubernetes,python" default:"shell" help:"${render_format}"`
	Server        string   `placeholder:"NAME" help:"The ModelServer's metadata.name, where the file has several."`
	EngineVersion string   `placeholder:"VERSION" help:"${render_engine_version}"`
	Model         string   `placeholder:"MODEL" help:"${render_model}"`
	Image         string   `placeholder:"IMAGE" help:"The container image; the engine's own otherwise."`
	CPU           bool     `help:"The engines run on CPUs."`
	Gateway       string   `placeholder:"HOST" help:"${render_gateway}"`
	Prefill       []string `sep:"none" placeholder:"URL" help:"${render_prefill}"`
	Decode        []string `sep:"none" placeholder:"URL" help:"A decode engine, in the same way."`
	Encode        []string `sep:"none" placeholder:"URL" help:"An encode engine, in the same way."`
	Out           string   `short:"o" placeholder:"DIR" help:"Write files into this folder, one for each ModelServer."`
	JSON          bool     `name:"json" help:"${render_json}"`
}

// endings are the endings of the files that -o writes.
var endings = map[string]string{"shell": ".sh", "compose": ".compose.yaml", "kubernetes": ".yaml", "python": ".py"}

// Run prints the settings, or writes them to files.
func (c *renderCmd) Run(s streams) error {
	if c.JSON && c.Format != "shell" {
		return errors.New("--json is a form of its own, without --format")
	}
	list, err := readModels(c.File, s.in)
	if err != nil {
		return err
	}
	if c.Out == "" || c.Server != "" {
		m, err := only(list, c.Server)
		if err != nil {
			return fmt.Errorf("%w, or write all of them with -o", err)
		}
		list = []modelServer{m}
	}
	for _, m := range list {
		text, err := c.render(m)
		if err != nil {
			return fmt.Errorf("ModelServer %s: %w", m.name, err)
		}
		if c.Out == "" {
			_, err = s.out.Write(text)
		} else {
			ending := endings[c.Format]
			if c.JSON {
				ending = ".json"
			}
			err = write(filepath.Join(c.Out, m.name+ending), text)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func write(file string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o600) // the settings may contain a store's password
}

func (c *renderCmd) render(m modelServer) ([]byte, error) {
	version, err := launch.ParseVersion(c.EngineVersion)
	if err != nil {
		return nil, fmt.Errorf("--engine-version: %w", err)
	}
	endpoints, notes, err := c.endpoints(m)
	if err != nil {
		return nil, err
	}
	plan, err := launch.With(m.Main.KVConnector, launch.Deployment{
		Spec: m.spec, Endpoints: endpoints, Model: m.model, Path: cmp.Or(c.Model, m.model), Name: m.name,
		Version: version, Gateway: c.Gateway, CPU: c.CPU,
	})
	if err != nil {
		return nil, err
	}
	plan.Image = c.Image
	if c.CPU && c.Image == "" && (c.Format == "compose" || c.Format == "kubernetes") {
		notes = append(notes, launch.Note{Text: "The image is for GPUs: name one for CPUs with --image."})
	}
	plan.Notes = slices.Concat(notes, plan.Notes, m.notes())
	for i := range plan.Engines {
		plan.Engines[i].Labels = m.labels(plan.Engines[i].Target.Endpoint.Role)
	}
	if c.JSON {
		return plan.JSON()
	}
	switch c.Format {
	case "compose":
		return plan.Compose(), nil
	case "kubernetes":
		return plan.Kubernetes(), nil
	case "python":
		return plan.Python()
	}
	return plan.Shell(), nil
}

// endpoints are those of the command line. If there are none, they are those of the file. If there are none either,
// they are one of each role, under the names that rendered pods have in a cluster, or on this machine; notes then say
// so, since nobody asked for these.
func (c *renderCmd) endpoints(m modelServer) ([]discovery.Endpoint, []launch.Note, error) {
	var list []discovery.Endpoint
	for i, text := range slices.Concat(c.Prefill, c.Decode, c.Encode) {
		role := "prefill"
		switch {
		case i >= len(c.Prefill)+len(c.Decode):
			role = "encode"
		case i >= len(c.Prefill):
			role = "decode"
		}
		e, err := given(text, role)
		if err != nil {
			return nil, nil, err
		}
		list = append(list, e)
	}
	if len(list) > 0 {
		return list, nil, nil
	}
	if len(m.endpoints) > 0 {
		return m.endpoints, nil, nil
	}
	roles := []string{"prefill", "decode"}
	if m.Has("spec.encoder") {
		roles = append(roles, "encode")
	}
	for i, role := range roles {
		url := fmt.Sprintf("http://127.0.0.1:%d", 8100+100*i)
		if c.Format == "kubernetes" {
			url = fmt.Sprintf("http://%s-0.%s:%d", role, launch.Label(m.name), m.port())
		}
		e, err := endpoint(url, role, nil)
		if err != nil {
			return nil, nil, err
		}
		list = append(list, e)
	}
	return list, []launch.Note{
		{Text: "The file lists no engines, so here is one of each role. Others: --prefill and --decode."},
	}, nil
}
