// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/lab/internal/apis"
)

// verifyAll proves the named connectors, or all if none is named, with one pair of engines after the other.
func verifyAll(ctx context.Context, lab *lab, names []string) error {
	var failed error
	tried := 0
	for i := range verifications {
		v := &verifications[i]
		if len(names) > 0 && !slices.Contains(names, v.connector) {
			continue
		}
		tried++
		began := time.Now()
		err := v.run(ctx, lab)
		if err != nil && !errors.Is(err, errNotProven) {
			return fmt.Errorf("%s: %w", v.connector, err)
		}
		failed = errors.Join(failed, err)
		fmt.Printf("%s took %.0f s\n\n", v.connector, time.Since(began).Seconds())
	}
	if tried == 0 {
		return fmt.Errorf("no such connector to verify: there are %s", strings.Join(connectors(), ", "))
	}
	return failed
}

// aDay is how many connectors have their turn on a day: one takes a minute or two, sglang with its faults five.
const aDay = 2

// today lists the connectors that are proven on a day of the year: lmcache, and some of the others in turn.
// It leaves nixl to prove -all, which plays its faults, too.
func today(yearDay int) (list []string) {
	var others []string
	for _, name := range connectors() {
		switch name {
		case "nixl":
		case "lmcache":
			list = append(list, name)
		default:
			others = append(others, name)
		}
	}
	for i := range aDay {
		list = append(list, others[(yearDay*aDay+i)%len(others)])
	}
	return list
}

func connectors() (list []string) {
	for _, v := range verifications {
		list = append(list, v.connector)
	}
	return list
}

// engineVersion is the version that install.sh installs.
const engineVersion = "0.32.0"

// run launches a pair with the connector's launch settings, and pdctl judges it in each stage. The twins among these
// are broken, and pdctl must find it; otherwise its judgement would be worth nothing.
func (v *verification) run(ctx context.Context, lab *lab) error {
	if v.proves != nil {
		return v.proves(ctx, lab)
	}
	p, err := newPair(v, lab)
	if err != nil {
		return err
	}
	defer p.stop()
	var failed error
	for _, s := range v.stages {
		if err := p.run(ctx, s); err != nil {
			return err
		}
		err := p.judge(ctx, s)
		if s.orphan && err == nil {
			err = p.orphan(ctx)
		}
		if err != nil && !errors.Is(err, errNotProven) {
			return err
		}
		failed = errors.Join(failed, err)
	}
	return failed
}

// judge runs pdctl verify against a gateway and requires its exit status: 0 for proven, 1 with the reason for a twin.
func (p *pair) judge(ctx context.Context, s stage) error {
	o := gatewayOptions{connector: p.v.connector, config: string(p.config), endpoints: p.endpoints}
	if s.connector != "" {
		o.connector, o.config = s.connector, ""
	}
	gateway, err := p.lab.startGateway(ctx, o)
	if err != nil {
		return err
	}
	want := 0
	if s.reason != "" {
		want = 1
	}
	odd, err := p.lab.verify(ctx, gateway, strings.TrimSuffix(p.v.connector+", "+s.what, ", "), want, s.reason)
	if s.reason == "" && err == nil {
		var more []string
		more, err = p.survey(ctx, gateway.url)
		odd = append(odd, more...)
	}
	return asItMustBe(odd, errors.Join(err, stopGateway(gateway)))
}

// verify runs pdctl verify against a gateway. It says what is odd if pdctl does not end with a status, or does not say
// something.
func (l *lab) verify(ctx context.Context, gateway *process, what string, want int, says string, more ...string) (
	odd []string, err error) {
	args := append([]string{"verify", "-f", gateway.config, "--gateway", gateway.url}, more...)
	//nolint:gosec // G204: the program is built by this one
	output, err := exec.CommandContext(ctx, filepath.Join(l.dir, "pdctl"), args...).CombinedOutput()
	status := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		status, err = exit.ExitCode(), nil
	}
	fmt.Printf("%s: pdctl verify ends with %d\n%s", what, status, output)
	if status != want || !strings.Contains(string(output), says) {
		odd = append(odd, fmt.Sprintf("pdctl verify was to end with %d and to say %q", want, says))
	}
	return odd, err
}

// asItMustBe prints what is odd, unless the proof itself failed. It returns errNotProven if something is.
func asItMustBe(odd []string, err error) error {
	if err != nil || len(odd) == 0 {
		return err
	}
	fmt.Printf("NOT as it must be:\n  - %s\n", strings.Join(odd, "\n  - "))
	return errNotProven
}

// orphan breaks the prefill leg off after decode was sent. An engine would let that decode wait for ever, and keep its
// blocks or its sender. The gateway must cancel it, serve the request with a new attempt, and serve the next requests
// with the same pair.
func (p *pair) orphan(ctx context.Context) error {
	toP, err := newIntercept(p.endpoints[0].URL.String())
	if err != nil {
		return err
	}
	defer toP.close()
	behind := slices.Clone(p.endpoints)
	if behind[0].URL, err = url.Parse(toP.url); err != nil {
		return err
	}
	gateway, err := p.lab.startGateway(
		ctx, gatewayOptions{connector: p.v.connector, config: string(p.config), endpoints: behind},
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
		q := newQuestion(apis.Completions, false, 200, 16)
		a := ask(ctx, gateway.url, q, nil)
		want := p.alone(ctx, q)
		if a.Err != nil || a.Text() != want.Text() || a.status != http.StatusOK || a.mode != "disaggregated" ||
			a.took > 10*time.Second {
			odd = append(odd, fmt.Sprintf("request %d after a prefill that broke off: %s, served %q, text equal: %t", i+
				1, a, a.mode, a.Text() == want.Text()))
		}
	}
	fmt.Printf("  prefill broken off with decode in flight: 3 requests, %d not as they must be\n", len(odd))
	return asItMustBe(odd, stopGateway(gateway))
}

// alone asks one engine, which computes the whole prompt: P, since D would find in a store what P has put there.
func (p *pair) alone(ctx context.Context, q question) *response {
	one := p.endpoints[0]
	if p.v.aloneOnD {
		one = p.endpoints[1]
	}
	return ask(ctx, one.URL.String(), q.salted(), nil)
}

// survey sends a request of each client API that the connector carries, streamed and not, and says what is wrong: the
// text must be that of one engine alone, two engines must have served it, and decode must have taken over most of the
// prompt tokens.
func (p *pair) survey(ctx context.Context, gateway string) (odd []string, err error) {
	d := p.endpoints[1].URL.String()
	before, err := readMetrics(ctx, d)
	if err != nil {
		return nil, err
	}
	tokens := 0
	all := questions()
	if apis := p.conn.Traits().APIs; apis != nil {
		all = slices.DeleteFunc(all, func(q question) bool {
			return !slices.ContainsFunc(apis, func(api connector.API) bool { return api.Path() == q.api.Path })
		})
	}
	for _, q := range all {
		a := ask(ctx, gateway, q, nil)
		want := p.alone(ctx, q)
		if !want.Whole || want.status != http.StatusOK {
			return nil, fmt.Errorf("one engine alone: %s", want)
		}
		tokens += a.PromptTokens
		if a.Err != nil || !a.Whole || a.Text() != want.Text() || a.mode != "disaggregated" {
			odd = append(odd, fmt.Sprintf("%s: %s, served %q, text equal: %t", q, a, a.mode, a.Text() == want.Text()))
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
