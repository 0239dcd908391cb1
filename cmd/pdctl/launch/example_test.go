// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"encoding/json"
	"fmt"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	_ "github.com/pdkit/pdkit/connector/sharedstorage"
	"github.com/pdkit/pdkit/discovery"
)

func ExampleModel() {
	p, _ := discovery.New("http://10.0.0.1:8000", discovery.RolePrefill)
	d, _ := discovery.New("http://10.0.0.2:8000", discovery.RoleDecode)
	plan, err := launch.Model(launch.Deployment{
		Spec:      config.Spec{Type: "ExampleConnector", Config: json.RawMessage(`{"shared_storage_path": "/mnt/kv"}`)},
		Endpoints: []discovery.Endpoint{p, d},
		Model:     "llama2-7b",
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, e := range plan.Engines {
		fmt.Println(e.Name, e.Settings.KVTransfer.JSON())
	}
	// plan.Shell(), plan.Compose(), plan.Kubernetes() and plan.Python() write all of it.

	// Output:
	// prefill-0 {"kv_connector":"ExampleConnector","kv_role":"kv_both","kv_connector_extra_config":{"shared_storage_path":"/mnt/kv"}}
	// decode-0 {"kv_connector":"ExampleConnector","kv_role":"kv_both","kv_connector_extra_config":{"shared_storage_path":"/mnt/kv"}}
}
