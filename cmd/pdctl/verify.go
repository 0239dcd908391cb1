// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/pdflow/reuse"
	"github.com/pdkit/pdkit/transport"
)

type verifyCmd struct {
	File      string        `short:"f" placeholder:"FILE" help:"${verify_file}"`
	Server    string        `placeholder:"NAME" help:"The ModelServer's metadata.name, where the file has several."`
	Gateway   string        `placeholder:"URL" help:"${verify_gateway}"`
	Connector string        `placeholder:"TYPE" help:"kvConnector.type, or the engines' class name."`
	Config    string        `placeholder:"JSON" help:"The connector's settings."`
	Prefill   []string      `sep:"none" placeholder:"URL" help:"${verify_prefill}"`
	Decode    []string      `sep:"none" placeholder:"URL" help:"A decode engine, in the same way."`
	Model     string        `placeholder:"MODEL" help:"The model to ask for, if it is not spec.model."`
	Alone     string        `placeholder:"URL" help:"${verify_alone}"`
	Header    []string      `sep:"none" placeholder:"'NAME: VALUE'" help:"${verify_header}"`
	EngineKey string        `placeholder:"FILE" type:"existingfile" help:"${verify_engine_key}"`
	Probes    int           `default:"3" help:"How many synthetic probes to send."`
	Tokens    int           `default:"600" help:"How long each is, in tokens."`
	Timeout   time.Duration `default:"2m" help:"How long it may take in all."`
	JSON      bool          `name:"json" help:"Write the report as JSON."`
}

// Run sends the requests, counts and judges.
func (c *verifyCmd) Run(s streams) error {
	m, err := c.read(s)
	if err != nil {
		return err
	}
	conn, err := connector.Open(m.spec)
	if err != nil {
		return config.Within("spec.kvConnector.config", err)
	}
	ctx, stop := interruptible()
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	client, engines := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
		&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	key := func() http.Header { return nil }
	if c.EngineKey != "" {
		if key, err = transport.KeyFile(c.EngineKey); err != nil {
			return fmt.Errorf("--engine-key: %w", err)
		}
		engines.Transport = transport.WithHeader(engines.Transport, key)
	}
	for _, address := range []struct {
		flag string
		url  *string
	}{{"--gateway", &c.Gateway}, {"--alone", &c.Alone}} {
		if *address.url == "" {
			continue
		}
		if *address.url, err = baseURL(address.flag, *address.url); err != nil {
			return err
		}
	}
	t := reuse.Target{Connector: conn, Model: cmp.Or(c.Model, m.model), Alone: c.Alone, Client: engines}
	if t.Model == "*" {
		t.Model = ""
	}
	for _, e := range m.endpoints {
		if e.Role.Has(discovery.RolePrefill) {
			t.Prefill = append(t.Prefill, e.URL.String())
		}
		if e.Role.Has(discovery.RoleDecode) {
			t.Decode = append(t.Decode, e.URL.String())
		}
	}
	if c.Gateway != "" {
		header, err := headers(c.Header)
		if err != nil {
			return err
		}
		t.Ask = reuse.Gateway(c.Gateway, client, header)
	} else {
		flow, end, err := pairFlow(ctx, conn, m.endpoints)
		if err != nil {
			return err
		}
		defer end()
		t.Ask = reuse.Flow(flow, key())
	}
	report, err := reuse.Verify(ctx, t, reuse.Options{Probes: c.Probes, Tokens: c.Tokens})
	if err != nil {
		return orInterrupted(ctx, fmt.Errorf("nothing could be judged: %w", err))
	}
	if c.JSON {
		err = writeJSON(s.out, report)
	} else {
		_, err = fmt.Fprint(s.out, report)
	}
	if err != nil {
		return err
	}
	if report.Verdict != reuse.Reused {
		return errFaults
	}
	return nil
}

// read reads the file, if there is one, and overrides it by the flags.
func (c *verifyCmd) read(s streams) (m modelServer, err error) {
	if c.File != "" {
		if m, err = readModel(c.File, c.Server, s.in); err != nil {
			return m, err
		}
	}
	if c.Connector != "" {
		m.spec = config.Spec{Type: c.Connector}
	}
	if c.Config != "" {
		if !json.Valid([]byte(c.Config)) {
			return m, errors.New("--config is not JSON")
		}
		m.spec.Config = json.RawMessage(c.Config)
	}
	for _, side := range []struct {
		role  string
		given []string
		is    discovery.Role
	}{{"prefill", c.Prefill, discovery.RolePrefill}, {"decode", c.Decode, discovery.RoleDecode}} {
		if len(side.given) == 0 {
			continue
		}
		var others []discovery.Endpoint
		for _, e := range m.endpoints {
			if e.Role != side.is {
				others = append(others, e)
			}
		}
		m.endpoints = others
		for _, text := range side.given {
			e, err := given(text, side.role)
			if err != nil {
				return m, err
			}
			m.endpoints = append(m.endpoints, e)
		}
	}
	var roles discovery.Role
	for _, e := range m.endpoints {
		roles |= e.Role
	}
	if !roles.Has(discovery.RoleBoth) {
		return m, errors.New("needs a prefill and a decode engine, to read their metrics: in the file's static " +
			"endpoints, or by --prefill and --decode")
	}
	return m, nil
}

func headers(lines []string) (http.Header, error) {
	h := http.Header{}
	for _, line := range lines {
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			return nil, errors.New("--header is not NAME: VALUE") // it leaves the line out, which may hold a key
		}
		h.Add(strings.TrimSpace(name), strings.TrimSpace(value))
	}
	return h, nil
}

// pairFlow runs both legs in this program.
func pairFlow(ctx context.Context, conn connector.KVConnector, endpoints []discovery.Endpoint) (*pdflow.Flow, func(),
	error) {
	set, err := static.NewSet(endpoints...)
	if err != nil {
		return nil, nil, err
	}
	flow, err := pdflow.New(conn, pick.New(set, pick.RoundRobin()), pdflow.WithRetry(config.Retry{MaxAttempts: 1}))
	if err != nil {
		return nil, nil, err
	}
	end := func() {
		rest, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = flow.Shutdown(rest) // nothing is in flight
	}
	if err := flow.Start(ctx); err != nil {
		end()
		return nil, nil, err
	}
	return flow, end, nil
}
