// SPDX-License-Identifier: Apache-2.0

package registration_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/registration"
)

// An engine registers by HTTP, and a set over the source lists it.
func Example() {
	source, err := registration.New(&registration.Options{
		Listen: "127.0.0.1:0", // for P2pNccl's and MoRIIO's engines: proxy_port and proxy_ping_port
		HTTP:   "127.0.0.1:0", // for all others
		Token:  "a-secret",
	})
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	if err := source.Start(ctx); err != nil {
		panic(err)
	}
	defer source.Close()
	set := discovery.NewSet(source)
	ended := make(chan error, 1)
	go func() { ended <- set.Run(ctx) }()

	body := `{"id": "prefill-0", "url": "http://10.0.0.1:8000", "role": "prefill", "attributes": {"bootstrapPort": ` +
		`"8998"}, "leaseSeconds": 30}`
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+source.HTTPAddr()+"/v1/endpoints",
		strings.NewReader(body))
	request.Header.Set("Authorization", "Bearer a-secret")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		panic(err)
	}
	_ = response.Body.Close()
	fmt.Println(response.Status)

	_ = set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return len(s.Endpoints) > 0 })
	for _, e := range set.Load().Endpoints {
		fmt.Println(e.ID, e.Role, e.Phase, e.Attribute("bootstrapPort"))
	}
	stop()
	<-ended
	// Output:
	// 201 Created
	// prefill-0 prefill ready 8998
}
