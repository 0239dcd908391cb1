// SPDX-License-Identifier: Apache-2.0

package dns_test

import (
	"context"
	"fmt"
	"net"
	"time"

	wire "github.com/miekg/dns"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/dns"
)

// Two headless services of Kubernetes: their names stand for the addresses of all their ready pods.
func Example() {
	resolver, stop := exampleServer(
		map[string]string{"prefill.llm.svc.cluster.local.": "10.0.0.1", "decode.llm.svc.cluster.local.": "10.0.0.2"},
	)
	defer stop()

	source, err := dns.New(&dns.Options{
		Prefill:  "prefill.llm.svc.cluster.local",
		Decode:   "decode.llm.svc.cluster.local",
		Port:     8000,
		Resolver: resolver,        // left out: what /etc/resolv.conf says
		MaxTTL:   5 * time.Second, // a change is seen within this time
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	set := discovery.NewSet(source)
	set.OnError(func(err error) { fmt.Println(err) })
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	done := make(chan error)
	go func() { done <- set.Run(ctx) }()

	if err := set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return len(s.Endpoints) > 0 }); err != nil {
		fmt.Println(err)
	}
	for _, e := range set.Load().Endpoints {
		fmt.Println(e.URL, e.Role)
	}
	cancel()
	<-done
	// Output:
	// http://10.0.0.1:8000 prefill
	// http://10.0.0.2:8000 decode
}

// An option that is wrong is named, and not repeated.
func ExampleNew_error() {
	_, err := dns.New(&dns.Options{Prefill: "http://prefill.example:8000"})
	fmt.Println(err)
	// Output: dns: Prefill is not a domain name
}

// exampleServer stands for a cluster's DNS.
func exampleServer(names map[string]string) (addr string, stop func()) {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		return "", func() {}
	}
	started := make(chan struct{})
	server := &wire.Server{PacketConn: conn, NotifyStartedFunc: func() { close(started) }}
	server.Handler = wire.HandlerFunc(func(w wire.ResponseWriter, q *wire.Msg) {
		m := new(wire.Msg).SetReply(q)
		if ask := q.Question[0]; ask.Qtype == wire.TypeA {
			rr, _ := wire.NewRR(fmt.Sprintf("%s 30 IN A %s", ask.Name, names[ask.Name]))
			m.Answer = append(m.Answer, rr)
		}
		_ = w.WriteMsg(m)
	})
	go server.ActivateAndServe()
	<-started
	return conn.LocalAddr().String(), func() { _ = server.Shutdown() }
}
