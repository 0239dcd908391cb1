// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"time"

	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/kubernetes"
)

// Pods with the label app=llama2-7b are engines: those with role=prefill prefill, those with role=decode decode, and
// a pair has the same value of the label group.
func Example() {
	config, stop := exampleCluster() // config, err := kubernetes.Config("")
	defer stop()

	source, err := kubernetes.New(&kubernetes.Options{
		Config:    config,
		Namespace: "llm",
		Selector: kubernetes.Selector{
			MatchLabels: map[string]string{"app": "llama2-7b"},
			PDGroup: &kubernetes.PDGroup{
				GroupKey:      "group",
				PrefillLabels: map[string]string{"role": "prefill"},
				DecodeLabels:  map[string]string{"role": "decode"},
			},
		},
		OnError: func(err error) { fmt.Println(err) },
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	set := discovery.NewSet(source)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	done := make(chan error)
	go func() { done <- set.Run(ctx) }()

	if err := set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return len(s.Endpoints) > 0 }); err != nil {
		fmt.Println(err)
	}
	for _, e := range set.Load().Endpoints {
		fmt.Println(e.ID, e.URL, e.Role, e.Phase, e.Group, e.Attribute("zmqAddress"))
	}
	cancel()
	<-done
	// Output:
	// llm/decode-0 http://10.0.0.2:8000 decode ready 1 10.0.0.2:22001
	// llm/prefill-0 http://10.0.0.1:8100 prefill ready 1 10.0.0.1:21001
}

// The engines of services, whose roles are known: pods are not read, and no right to read them is needed.
func ExampleNew_services() {
	_, err := kubernetes.New(&kubernetes.Options{
		Config:    &rest.Config{Host: "https://10.96.0.1"},
		Namespace: "llm",
		Services: []kubernetes.Service{
			{Name: "prefill", Role: discovery.RolePrefill},
			{Name: "decode", Role: discovery.RoleDecode},
		},
		Port:       "api", // the services' port of this name
		Attributes: map[string]string{"zmqAddress": "$(POD_IP):21001"},
	})
	fmt.Println(err)
	// Output: <nil>
}

// exampleCluster stands for a cluster's API server. It knows two pods, and nothing ever happens to them.
func exampleCluster() (config *rest.Config, stop func()) {
	const pods = `{"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "7"}, "items": [
		{"metadata": {"name": "prefill-0", "labels": {"role": "prefill", "app": "llama2-7b", "group": "1"},
		  "annotations": {"pdkit.dev/zmqAddress": "$(POD_IP):21001"}},
		 "spec": {"containers": [{"ports": [{"name": "http", "containerPort": 8100}]}]},
		 "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}},
		{"metadata": {"name": "decode-0", "labels": {"role": "decode", "app": "llama2-7b", "group": "1"},
		  "annotations": {"pdkit.dev/zmqAddress": "$(POD_IP):22001"}},
		 "status": {"phase": "Running", "podIP": "10.0.0.2", "conditions": [{"type": "Ready", "status": "True"}]}}]}`
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch q := r.URL.Query(); {
		case q.Get("sendInitialEvents") != "":
			w.WriteHeader(http.StatusUnprocessableEntity) // an older server, which is asked for a list then
		case q.Get("watch") != "":
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		default:
			_, _ = io.WriteString(w, pods)
		}
	}))
	return &rest.Config{Host: server.URL}, func() {
		server.CloseClientConnections()
		server.Close()
	}
}
