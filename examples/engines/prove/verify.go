// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	_ "github.com/pdkit/pdkit/connector/all" // the connectors that a case may name
	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/discovery"
)

// verification is a connector with settings. Its own Renderer launches the engines, and pdctl verify judges them.
type verification struct {
	name, connector string
	config          string // JSON; FOLDER stands for a folder that both engines share
	attributes      func(p launchedEngine) map[string]string
	module          string // the module of the engine's connector, if a CPU needs another one
	together        bool   // both legs are sent at once: after a failed prefill decode must not wait
	apart           bool   // each engine has a folder of its own, which pdctl must notice
	// proves, if not nil, proves the connector by itself, on another engine than vLLM, which engine names.
	proves func(context.Context, *lab) error
	engine string
}

// verifications are the connectors of vLLM 0.32.0 that run on a CPU.
var verifications = []verification{
	{name: "nixl", connector: "nixl"},
	{name: "nixl-push, together", connector: "nixl-push", attributes: pushAttributes, together: true},
	{name: "nixl-push, serial", connector: "nixl-push", config: `{"dispatch":"serial"}`, attributes: pushAttributes},
	{name: "sharedstorage", connector: "sharedstorage", config: `{"sharedStoragePath":"FOLDER"}`},
	{name: "sharedstorage, not shared", connector: "sharedstorage", config: `{"sharedStoragePath":"FOLDER"}`,
		apart: true},
	{name: "multi", connector: "multi", config: `{"connectors":[{"type":"nixl"},{"type":"sharedstorage",` +
		`"config":{"sharedStoragePath":"FOLDER"}}]}`},
	{name: "mooncake", connector: "mooncake", attributes: func(p launchedEngine) map[string]string {
		return map[string]string{"bootstrapPort": p.side}
	}, module: "mooncake_cpu", together: true},
	{name: "sglang", connector: "sglang", proves: proveSGLang, engine: "SGLang " + sglangVersion},
}

// pushAttributes say where P is before P has answered.
func pushAttributes(p launchedEngine) map[string]string {
	return map[string]string{"engineID": "pdkit-prefill", "sideChannelHost": "127.0.0.1", "sideChannelPort": p.side}
}

// launchedEngine is where an engine listens.
type launchedEngine struct{ port, side string }

func newEngine() (e launchedEngine, err error) {
	if e.port, err = freePort(); err == nil {
		e.side, err = freePort()
	}
	return e, err
}

func (e launchedEngine) endpoint(role discovery.Role, attributes map[string]string) discovery.Endpoint {
	return discovery.Endpoint{ID: role.String(), URL: &url.URL{Scheme: "http", Host: "127.0.0.1:" + e.port}, Role: role,
		Attributes: attributes}
}

// verifyAll proves the named connectors, or all if none is named, with one pair of engines after the other.
func verifyAll(ctx context.Context, lab *lab, names []string) error {
	var failed error
	tried := 0
	for _, v := range verifications {
		if len(names) > 0 && !slices.Contains(names, v.connector) && !slices.Contains(names, v.name) {
			continue
		}
		tried++
		began := time.Now()
		err := v.run(ctx, lab)
		if err != nil && !errors.Is(err, errNotProven) {
			return fmt.Errorf("%s: %w", v.name, err)
		}
		failed = errors.Join(failed, err)
		fmt.Printf("%s took %.0f s\n\n", v.name, time.Since(began).Seconds())
	}
	switch {
	case tried == 0:
		return fmt.Errorf("no such connector to verify: there are nixl, nixl-push, sharedstorage, multi, mooncake " +
			"and sglang")
	case len(names) > 0:
		return failed
	}
	return errors.Join(failed, compareProven(provenFile))
}

// provenFile is the file from which the README's table of connectors takes its evidence.
const provenFile = "connector/all/testdata/proven.json"

// compareProven checks that the file names exactly the connectors that were proven here, with the engine's version.
func compareProven(file string) error {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var told map[string]string
	if err := json.Unmarshal(raw, &told); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	var odd []string
	for _, v := range verifications {
		if !strings.Contains(told[v.connector], cmp.Or(v.engine, "vLLM "+engineVersion)) {
			odd = append(odd, v.connector)
		}
	}
	for name := range told {
		if !slices.ContainsFunc(verifications, func(v verification) bool { return v.connector == name }) {
			odd = append(odd, name)
		}
	}
	if len(odd) > 0 {
		fmt.Printf("%s does not tell what was proven with vLLM %s: %s\n", file, engineVersion, strings.Join(odd, ", "))
		return errNotProven
	}
	return nil
}

// engineVersion is the version that install.sh installs.
const engineVersion = "0.32.0"

// run launches a pair as the connector's Renderer says, and pdctl judges it. Then pdctl must find a fault with the same
// engines behind the connector http; otherwise its judgement would be worth nothing.
func (v verification) run(ctx context.Context, lab *lab) error {
	if v.proves != nil {
		return v.proves(ctx, lab)
	}
	folder, err := os.MkdirTemp(lab.dir, "store-")
	if err != nil {
		return err
	}
	settings := json.RawMessage(strings.ReplaceAll(v.config, "FOLDER", folder))
	conn, err := connector.Open(config.Spec{Type: v.connector, Config: settings})
	if err != nil {
		return err
	}
	p, err := newEngine()
	if err != nil {
		return err
	}
	d, err := newEngine()
	if err != nil {
		return err
	}
	attributes := map[string]string{"sideChannelPort": p.side}
	if v.attributes != nil {
		attributes = v.attributes(p)
	}
	pair := []discovery.Endpoint{p.endpoint(discovery.RolePrefill, attributes),
		d.endpoint(discovery.RoleDecode, map[string]string{"sideChannelPort": d.side, "bootstrapPort": d.side})}
	processes, err := v.launch(ctx, lab, conn, pair, []launchedEngine{p, d})
	if err != nil {
		return err
	}
	defer func() {
		for _, process := range processes {
			process.stop()
		}
	}()
	if v.apart {
		return v.judge(ctx, lab, v.connector, settings, pair, 1)
	}
	judged := v.judge(ctx, lab, v.connector, settings, pair, 0)
	if v.together && judged == nil {
		judged = v.orphan(ctx, lab, settings, pair)
	}
	if judged != nil && !errors.Is(judged, errNotProven) {
		return judged
	}
	if v.connector == "sharedstorage" || v.connector == "multi" {
		return judged // behind http, which also sends P first, a store still reuses KV
	}
	return errors.Join(judged, v.judge(ctx, lab, "http", nil, pair, 1))
}

func (v verification) launch(ctx context.Context, lab *lab, conn connector.KVConnector, pair []discovery.Endpoint,
	engines []launchedEngine) ([]*process, error) {
	renderer, ok := connector.As[launch.Renderer](conn)
	if !ok {
		return nil, errors.New("the connector renders no launch settings")
	}
	version, err := launch.ParseVersion(engineVersion)
	if err != nil {
		return nil, err
	}
	var wanted []engineOptions
	for i, e := range pair {
		settings, err := renderer.Render(
			launch.Target{Endpoint: e, Engines: pair, Model: "tiny", Version: version, CPU: true},
		)
		if err != nil {
			return nil, err
		}
		if settings.KVTransfer == nil || len(settings.Files) > 0 {
			return nil, errors.New("the rendered settings are none that engine.sh can take")
		}
		settings.KVTransfer.ModulePath = v.module
		if v.apart {
			settings.KVTransfer.Extra["shared_storage_path"] = fmt.Sprint(
				settings.KVTransfer.Extra["shared_storage_path"], "-", i,
			)
		}
		o := engineOptions{role: e.Role.String(), port: engines[i].port, side: engines[i].side}
		for _, env := range settings.Env {
			o.more = append(o.more, env.Name+"="+env.Value)
		}
		o.more = append(o.more, settings.Args...)
		o.more = append(o.more, "--kv-transfer-config", settings.KVTransfer.JSON())
		if v.connector == "mooncake" {
			o.more = append(o.more, "VLLM_MOONCAKE_BOOTSTRAP_PORT="+engines[i].side)
		}
		wanted = append(wanted, o)
	}
	return lab.startEngines(ctx, wanted...)
}

// judge runs pdctl verify against a gateway and requires an exit status: 0 for proven, 1 for a fault.
func (v verification) judge(ctx context.Context, lab *lab, typ string, settings json.RawMessage,
	pair []discovery.Endpoint, want int) error {
	gateway, err := lab.startGateway(ctx, gatewayOptions{connector: typ, config: string(settings), endpoints: pair})
	if err != nil {
		return err
	}
	//nolint:gosec // G204: the program is built by this one
	cmd := exec.CommandContext(ctx, filepath.Join(lab.dir, "pdctl"), "verify", "-f", gateway.config, "--gateway",
		gateway.url)
	output, err := cmd.CombinedOutput()
	status := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		status, err = exit.ExitCode(), nil
	}
	fmt.Printf("%s, kvConnector.type %s: pdctl verify ends with %d\n%s", v.name, typ, status, output)
	var odd []string
	if err == nil && want == 0 {
		odd, err = survey(ctx, gateway.url, pair)
	}
	if err = errors.Join(err, stopGateway(gateway)); err != nil {
		return err
	}
	if status != want {
		odd = append(odd, fmt.Sprintf("pdctl verify was to end with %d", want))
	}
	if len(odd) > 0 {
		fmt.Printf("NOT as it must be:\n  - %s\n", strings.Join(odd, "\n  - "))
		return errNotProven
	}
	return nil
}

// orphan breaks the prefill leg off after decode was sent. An engine would let that decode wait for ever, and keep its
// blocks or its sender. The gateway must cancel it, serve the request with a new attempt, and serve the next requests
// with the same pair.
func (v verification) orphan(ctx context.Context, lab *lab, settings json.RawMessage, pair []discovery.Endpoint) error {
	toP, err := newIntercept(pair[0].URL.String())
	if err != nil {
		return err
	}
	defer toP.close()
	behind := slices.Clone(pair)
	if behind[0].URL, err = url.Parse(toP.url); err != nil {
		return err
	}
	gateway, err := lab.startGateway(
		ctx, gatewayOptions{connector: v.connector, config: string(settings), endpoints: behind},
	)
	if err != nil {
		return err
	}
	var odd []string
	for i := range 3 {
		if i == 0 {
			toP.beforeRequest(func() error {
				time.Sleep(300 * time.Millisecond) // decode now waits at its engine
				return errors.New("dropped")
			})
		}
		q := newQuestion(completions, false, 200, 16)
		a := ask(ctx, gateway.url, q, "", nil)
		want := ask(ctx, pair[0].URL.String(), q, rand.Text(), nil)
		if a.err != nil || a.text != want.text || a.status != http.StatusOK || a.mode != "disaggregated" ||
			a.took > 10*time.Second {
			odd = append(odd, fmt.Sprintf("request %d after a prefill that broke off: %s, served %q, text equal: %t", i+
				1, a, a.mode, a.text == want.text))
		}
	}
	fmt.Printf("  prefill broken off with decode in flight: 3 requests, %d not as they must be\n", len(odd))
	if err := stopGateway(gateway); err != nil {
		return err
	}
	if len(odd) > 0 {
		fmt.Printf("NOT as it must be:\n  - %s\n", strings.Join(odd, "\n  - "))
		return errNotProven
	}
	return nil
}

// survey sends a request of each client API, streamed and not, and says what is wrong: the text must be that of the
// prefill engine alone, two engines must have served it, and decode must have taken over most of the prompt tokens.
func survey(ctx context.Context, gateway string, pair []discovery.Endpoint) (odd []string, err error) {
	p, d := pair[0].URL.String(), pair[1].URL.String()
	before, err := readMetrics(ctx, d)
	if err != nil {
		return nil, err
	}
	tokens := 0
	all := questions()
	for _, q := range all {
		a := ask(ctx, gateway, q, "", nil)
		want := ask(ctx, p, q, rand.Text(), nil) // P itself has computed what a store may still have
		if !want.whole || want.status != http.StatusOK {
			return nil, fmt.Errorf("one engine alone: %s", want)
		}
		tokens += a.promptTokens
		if a.err != nil || !a.whole || a.text != want.text || a.mode != "disaggregated" {
			odd = append(odd, fmt.Sprintf("%s: %s, served %q, text equal: %t", q, a, a.mode, a.text == want.text))
		}
	}
	after, err := waitFor(ctx, d, 3*time.Second, func(m metrics) bool { return 2*rise(before, m, takenOver) >= tokens })
	if err != nil {
		return nil, err
	}
	taken := rise(before, after, takenOver)
	fmt.Printf("  requests of all APIs, streamed and not: %d of %d as they must be, %d of %d prompt tokens "+
		"taken over\n", len(all)-len(odd), len(all), taken, tokens)
	if 2*taken < tokens {
		odd = append(odd, "decode computed the better part of these prompts itself")
	}
	return odd, nil
}
