// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/pdkit/pdkit/discovery/kubernetes"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// Each list is whole: what is not in it any more has been deleted, and what has another UID is another object of the
// same name.
func ExampleNewModelServers() {
	serve := func(ctx context.Context, logger *slog.Logger) error {
		config, err := kubernetes.Config("") // in a pod, as its service account
		if err != nil {
			return err
		}
		objects, err := kubernetes.NewModelServers(&kubernetes.ModelServerOptions{
			Config:    config,
			Namespace: "llm",
			OnError:   func(err error) { logger.Warn("ModelServers", "error", err) },
		})
		if err != nil {
			return err
		}
		return objects.Watch(ctx, func(list []kubernetes.ModelServer) {
			for _, o := range list {
				if _, err := modelserver.Read(o.Object); err != nil {
					logger.Warn("a ModelServer that cannot be served", "name", o.Name, "error", err)
				}
			}
		})
	}
	fmt.Println(serve(context.Background(), slog.New(slog.DiscardHandler)))
	// Output: kubernetes: this is no pod of a cluster: want the path of a kubeconfig file
}
