// SPDX-License-Identifier: Apache-2.0

package flags_test

import (
	"fmt"

	"github.com/pdkit/pdkit/cmd/pdctl/flags"
	"github.com/pdkit/pdkit/config"
)

func ExampleCheck() {
	var engines []flags.Engine
	for name, role := range map[string]string{"p": "kv_producer", "d": "kv_consumer"} {
		e, err := flags.Parse([]string{
			"vllm", "serve", "m", "--kv-transfer-config",
			`{"kv_connector":"LMCacheConnectorV1","kv_role":"` + role + `"}`,
		}, map[string]string{"PYTHONHASHSEED": "0"}, nil)
		if err != nil {
			fmt.Println(err)
			return
		}
		e.Name = name
		engines = append(engines, e)
	}
	for _, f := range flags.Check(engines, &config.Spec{Type: "lmcache"}) {
		fmt.Println(f.Severity, f.Code)
	}
	// Output: error lmcache-not-shared
}
