// SPDX-License-Identifier: Apache-2.0

package modelserver_test

import (
	"context"
	"fmt"
	"log"

	"github.com/pdkit/pdkit/config"
	_ "github.com/pdkit/pdkit/connector/all"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/modelserver"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// A gateway reads an object, and routes its model's requests to its flows.
func Example() {
	ms, err := modelserver.Read([]byte(`{
		"apiVersion": "networking.matrixinfer.ai/v1alpha1",
		"kind": "ModelServer",
		"metadata": {"name": "llama2-405b", "namespace": "llm"},
		"spec": {"model": "llama2-405b", "kvConnector": {"type": "nixl", "retry": {"maxAttempts": 3}},
			"rollout": {"weight": 10, "kvConnector": {"type": "nixl-push"}}}
	}`))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(ms.Namespace+"/"+ms.Name, "serves", ms.Model(), "with", ms.Main.Name, "and, to a share,",
		ms.Rollout.Name)
	fmt.Println("attempts:", ms.Main.Retry().MaxAttempts)

	set := discovery.NewSet() // of the sources that find the engines
	flows, err := ms.Flows(pick.New(set, pick.TwoChoices()), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer flows.Shutdown(context.Background())
	mux, err := pdflow.NewMux()
	if err != nil {
		log.Fatal(err)
	}
	if err := mux.SetRoutes(map[string]pdflow.Server{ms.Model(): flows.Server}); err != nil {
		log.Fatal(err)
	}
	// Output:
	// llm/llama2-405b serves llama2-405b with nixl and, to a share, nixl-push
	// attempts: 3
}

// All that is wrong is told at once, by field, without the settings' values.
func ExampleRead_faults() {
	_, err := modelserver.Read([]byte(`{
		"apiVersion": "networking.matrixinfer.ai/v1alpha1",
		"kind": "ModelServer",
		"spec": {"modell": "m", "kvConnector": {"type": "nixel"}, "rollout": {"weight": 200}}
	}`))
	for _, fe := range config.FieldErrors(err) {
		if fe.Path != "spec.kvConnector.type" {
			fmt.Println(fe)
		}
	}
	// Output:
	// spec.modell: unknown field; did you mean model?
	// spec.rollout.weight: is not a percentage; write 0 to 100
	// spec.rollout.kvConnector: is missing; write the connector to roll out: {type: NAME}
}
