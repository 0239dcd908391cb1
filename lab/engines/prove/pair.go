// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	_ "github.com/pdkit/pdkit/connector/all" // the connectors that a verification may name
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

// pair is one prefill and one decode engine of a verification, with the programs beside them.
type pair struct {
	v         *verification
	lab       *lab
	values    map[string]string // of the names in the verification's texts
	endpoints []discovery.Endpoint
	engines   [2]*process
	running   [2]started          // what the engines were started with
	beside    map[string]*process // by their commands
	config    json.RawMessage     // the connector's settings
	conn      connector.KVConnector
}

// started is everything that makes an engine what it is.
type started struct {
	more   []string // arguments of engine.sh
	files  []launch.File
	beside [][]string // commands of the programs that it needs
}

func newPair(v *verification, lab *lab) (*pair, error) {
	folder, err := os.MkdirTemp(lab.dir, v.connector+"-")
	if err != nil {
		return nil, err
	}
	if folder, err = filepath.Abs(folder); err != nil {
		return nil, err
	}
	p := &pair{v: v, lab: lab, values: map[string]string{"FOLDER": folder}, beside: map[string]*process{}}
	for i, role := range []discovery.Role{discovery.RolePrefill, discovery.RoleDecode} {
		attributes := map[string]string{}
		for _, a := range [][]string{v.prefill, v.decode}[i] {
			name, value, _ := strings.Cut(a, "=")
			attributes[name] = p.expand(value)
		}
		p.endpoints = append(p.endpoints, endpoint(role, p.expand("$"+role.String()), attributes))
	}
	return p, nil
}

// expand replaces the names in a verification's text. A name that has no value yet is a free port.
func (p *pair) expand(text string) string {
	return os.Expand(text, func(name string) string {
		if p.values[name] == "" {
			p.values[name], _ = freeport.One() // "" is no port, which whoever is given it refuses
		}
		return p.values[name]
	})
}

func (p *pair) stop() {
	for _, engine := range p.engines {
		if engine != nil {
			engine.stop()
		}
	}
	for _, program := range p.beside {
		program.stop()
	}
}

// open opens the connector with the stage's settings.
func (p *pair) open(s stage) (err error) {
	if s.config != "" {
		p.config = json.RawMessage(p.expand(s.config))
	}
	p.conn, err = connector.Open(config.Spec{Type: p.v.connector, Config: p.config})
	return err
}

// run makes the engines run as a stage wants them. It starts the programs beside them that do not run yet, and the
// engines whose settings are not those of the stage before.
func (p *pair) run(ctx context.Context, s stage) error {
	if err := p.open(s); err != nil {
		return err
	}
	var next [2]started
	var changed []int
	for i, e := range p.endpoints {
		var err error
		if next[i], err = p.wanted(e, s); err != nil {
			return err
		}
		for _, command := range next[i].beside {
			if err := p.startBeside(ctx, command); err != nil {
				return err
			}
		}
		if !reflect.DeepEqual(p.running[i], next[i]) {
			changed = append(changed, i)
		}
	}
	if p.v.both && slices.Contains(changed, 1) {
		changed = []int{0, 1}
	}
	var wanted []engineOptions
	for _, i := range changed {
		if p.engines[i] != nil {
			p.engines[i].stop()
		}
		e := p.endpoints[i]
		folder, err := next[i].write(p.lab.dir, p.v.connector+"-"+e.ID+"-")
		if err != nil {
			return err
		}
		wanted = append(wanted, engineOptions{role: e.ID, port: e.URL.Port(), more: next[i].more, folder: folder,
			side: p.expand("$" + strings.ToUpper(e.ID))})
		p.running[i] = next[i]
	}
	if len(wanted) == 0 {
		return nil
	}
	began := time.Now()
	engines, err := p.lab.startEngines(ctx, wanted...)
	for i, engine := range engines {
		p.engines[changed[i]] = engine
	}
	if err == nil {
		fmt.Printf("%s: %d engines ready after %.0f s\n", p.v.connector, len(wanted), time.Since(began).Seconds())
	}
	return err
}

// wanted is what an engine must be started with in a stage.
func (p *pair) wanted(e discovery.Endpoint, s stage) (started, error) {
	next, err := p.render(e)
	if err == nil && s.broken == e.ID {
		err = next.swap(p.expand, s.swap)
	}
	return next, err
}

// render asks the connector for an engine's settings.
func (p *pair) render(e discovery.Endpoint) (next started, err error) {
	s, err := render(p.conn, p.config, e, p.endpoints, engineVersion)
	if err != nil {
		return next, err
	}
	if s.KVTransfer == nil {
		return next, errors.New("the rendered settings are none that engine.sh can take")
	}
	if p.v.module != "" {
		s.KVTransfer.ModulePath = p.v.module
	}
	next.more, next.files = arguments(s), s.Files
	if p.v.connector == "mooncake" {
		next.more = append(next.more, "VLLM_MOONCAKE_BOOTSTRAP_PORT="+p.expand("$"+strings.ToUpper(e.ID)))
	}
	for _, c := range s.Companions {
		command := slices.Clone(c.Command)
		for _, argument := range p.v.beside {
			command = append(command, p.expand(argument))
		}
		next.beside = append(next.beside, command)
	}
	return next, nil
}

// render asks a connector for the settings of one of the engines.
func render(conn connector.KVConnector, config json.RawMessage, e discovery.Endpoint, engines []discovery.Endpoint,
	engineVersion string) (launch.Settings, error) {
	version, err := launch.ParseVersion(engineVersion)
	if err != nil {
		return launch.Settings{}, err
	}
	return launch.Render(conn, config,
		launch.Target{Endpoint: e, Engines: engines, Model: "tiny", Version: version, CPU: true})
}

// arguments are rendered settings as arguments of engine.sh.
func arguments(s launch.Settings) (more []string) {
	for _, env := range s.Env {
		more = append(more, env.Name+"="+env.Value)
	}
	more = append(more, s.Args...)
	if s.KVTransfer != nil {
		more = append(more, "--kv-transfer-config", s.KVTransfer.JSON())
	}
	return more
}

// endpoint is the entry of an engine of this machine.
func endpoint(role discovery.Role, port string, attributes map[string]string) discovery.Endpoint {
	return discovery.Endpoint{ID: role.String(), Role: role, Attributes: attributes,
		URL: &url.URL{Scheme: "http", Host: "127.0.0.1:" + port}}
}

// swap replaces texts wherever they are. Each must be somewhere, else the twin is not broken.
func (s *started) swap(expand func(string) string, texts []string) error {
	var all []*string
	for i := range s.more {
		all = append(all, &s.more[i])
	}
	for i := range s.files {
		all = append(all, &s.files[i].Content)
	}
	for _, command := range s.beside {
		for i := range command {
			all = append(all, &command[i])
		}
	}
	for i := 0; i < len(texts); i += 2 {
		from, to, found := expand(texts[i]), expand(texts[i+1]), false
		for _, text := range all {
			found = found || strings.Contains(*text, from)
			*text = strings.ReplaceAll(*text, from, to)
		}
		if !found {
			return fmt.Errorf("the rendered settings do not hold %s", from)
		}
	}
	return nil
}

// write makes a folder with the engine's files, in which it is started.
func (s *started) write(dir, name string) (string, error) {
	folder, err := os.MkdirTemp(dir, name)
	if err != nil {
		return "", err
	}
	for _, f := range s.files {
		if err := os.WriteFile(filepath.Join(folder, f.Name), []byte(f.Content), 0o600); err != nil {
			return "", err
		}
	}
	return folder, nil
}

// startBeside starts a program beside the engines, unless it runs, and waits until it listens at its --port.
func (p *pair) startBeside(ctx context.Context, command []string) error {
	key := strings.Join(command, " ")
	at := slices.Index(command, "--port")
	if p.beside[key] != nil {
		return nil
	}
	if at < 0 || at+1 == len(command) {
		return fmt.Errorf("%s: it has no --port", key)
	}
	//nolint:gosec // G204: the command is the connector's own
	cmd := exec.CommandContext(context.WithoutCancel(ctx), p.lab.script, append([]string{"beside"}, command...)...)
	program, err := p.lab.start(cmd, command[0], "")
	if err != nil {
		return err
	}
	p.beside[key] = program
	ctx, cancel := context.WithTimeoutCause(ctx, time.Minute, errors.New("a minute was not enough"))
	defer cancel()
	return program.Until(ctx, 100*time.Millisecond, func() bool { return listens(ctx, "127.0.0.1:"+command[at+1]) })
}

func listens(ctx context.Context, address string) bool {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return false
	}
	_ = conn.Close()
	return true
}
