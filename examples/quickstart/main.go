// SPDX-License-Identifier: Apache-2.0

// Quickstart shows one LLM request served by two engines, in one process and with nothing to install:
//
//	go run ./examples/quickstart            # a few seconds, then it ends; exit status 0 if all it claims was seen
//	go run ./examples/quickstart -serve     # the same, then it stays up until Ctrl-C, with a live view, for curl
//
// # What happens
//
// Answering a prompt is two jobs. Reading it (prefill) computes a cache, the KV cache, for each of its tokens; writing
// the response (decode) makes one token after another from that cache. The first job wants raw compute, the second
// memory bandwidth, and on one engine they get in each other's way: a long prompt makes everybody else's response
// stutter. So each gets an engine of its own:
//
//	client ──1──▶ gateway ──2──▶ P  reads the prompt, keeps its KV, and says where it lies (the handoff)
//	                      ◀─3───
//	                      ──4──▶ D  fetches the KV from P by itself, and writes the response
//	client ◀──6── gateway ◀─5───
//
// The gateway is one http.Handler, made in gateway.go by pdflow.New. It sends both requests, carries the handoff from
// P's response to D, and streams D's response to the client. The KV itself never passes through it.
//
// # What is real
//
// The gateway is what you would run in front of real engines, and all traffic is HTTP over loopback. The engines are
// simulated (package enginesim): they hold KV in memory, move it over TCP and count it in vLLM's own metrics. Their toy
// model takes each token from every byte of the KV it holds, so its responses are gibberish, but never random: KV that
// is wrong or stale gives other text. That is why "the same text as one engine alone" is a proof.
//
// # What to change
//
// With -connector http the gateway sends the same two requests and carries no handoff. The text stays right, since D
// then reads the prompt itself; the program sees that nothing was reused, says so, and exits with 1.
//
// The files: main.go is the story, gateway.go the two engines and the handler (copy from there, or from
// examples/nethttp), ask.go a client, show.go what is printed, proof.go what is checked, serve.go the part after
// -serve, live.go the program cmd/gateway, which has the live view and needs no more than live.go's configuration.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const (
	exitOK     = 0
	exitFailed = 1 // something that should be true was not
	exitUsage  = 2 // a wrong command line
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, wantsColour(os.Stdout)))
}

// run is the program; it returns its exit status.
func run(ctx context.Context, args []string, out io.Writer, colour bool) int {
	flags := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	flags.SetOutput(out)
	connectorName := flags.String("connector", "nixl", "nixl carries the KV handoff from P to D; http carries nothing")
	stay := flags.Bool("serve", false, "stay up until Ctrl-C, for curl, and open a live view")
	listen := flags.String("listen", "127.0.0.1:8000", "with -serve: the gateway's address")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return exitOK
		}
		return exitUsage
	}
	if !*stay {
		*listen = "127.0.0.1:0" // any free port
	}
	show := &screen{out: out, colour: colour}

	conn, err := newConnector(*connectorName)
	if err != nil {
		fmt.Fprintln(out, err)
		return exitUsage
	}
	lab, err := start(ctx, conn, *listen)
	if err != nil {
		show.failed(err)
		return exitFailed
	}
	err = tell(ctx, lab, show)
	if err == nil && *stay {
		view := show.openLive(ctx, lab, *connectorName)
		show.invite(lab, view)
		<-ctx.Done()
		show.draining()
		if view != nil {
			err = view.stop()
		}
	}
	if err = errors.Join(err, lab.stop()); err != nil {
		show.failed(err)
		return exitFailed
	}
	return exitOK
}

// notes makes the prompts long enough to see that reading them takes time.
const notes = ` Minutes: the harbour crane stands still since Monday. The part is ordered and comes by rail on
Friday. Until then the two small cranes share the night shift. Fuel for both is paid to the end of the month. The pilot
asks for one more lamp at the east pier, and gets it. Nobody else had anything to add.`

// requests are the client's requests. They begin differently; otherwise an engine would find the beginning in its own
// cache.
var requests = []request{
	completion("Sum up in one line:"+notes, false),
	completion("Write the headline for:"+notes, true),
	chat("Who has to act, and when?"+notes, false),
	chat("Translate for the pilot:"+notes, true),
}

// tell sends four requests over two engines and then shows the evidence. The error says what was not true.
func tell(ctx context.Context, lab *lab, show *screen) error {
	show.opening(lab)
	responses := make([]response, len(requests))
	for i, r := range requests {
		show.request(i+1, r)
		a, err := ask(ctx, lab.url, r, show.token)
		if err != nil {
			return fmt.Errorf("request %d: %w", i+1, err)
		}
		outcome, err := lab.legs.next(ctx, 5*time.Second)
		if err != nil {
			return fmt.Errorf("request %d: %w", i+1, err)
		}
		handoff := handoffOf(lab.decode.Requests())
		show.timeline(a, outcome, handoff != nil)
		if i == 0 {
			show.handoff(handoff)
		}
		responses[i] = a
	}
	checks, err := prove(ctx, lab, responses)
	if err != nil {
		return err
	}
	show.proof(checks)
	return verdict(checks)
}
