// SPDX-License-Identifier: Apache-2.0

// Package kubernetes finds engines in a Kubernetes cluster: as pods by their labels, or as the EndpointSlices of
// services. It also watches ModelServer objects, which say which engines serve which model with which connector.
//
//	config, err := kubernetes.Config("") // in a pod; a kubeconfig's path elsewhere
//	if err != nil {
//		return err
//	}
//	source, err := kubernetes.New(&kubernetes.Options{
//		Config:    config,
//		Namespace: "llm",
//		Selector: kubernetes.Selector{
//			MatchLabels: map[string]string{"app": "llama2-7b"},
//			PDGroup: &kubernetes.PDGroup{
//				GroupKey:      "group",
//				PrefillLabels: map[string]string{"role": "prefill"},
//				DecodeLabels:  map[string]string{"role": "decode"},
//			},
//		},
//	})
//	if err != nil {
//		return err
//	}
//	set := discovery.NewSet(source)
//	go set.Run(ctx)
//	flow, err := pdflow.New(conn, pick.New(set, pick.TwoChoices()))
//
// A pod's annotations say what labels cannot. pdkit.dev/model and pdkit.dev/version are the endpoint's model and
// version; any other pdkit.dev/NAME is its attribute NAME. Values may contain $(POD_IP), $(POD_NAME) and $(NODE_NAME),
// so that the template of a Deployment can have zmqAddress: "$(POD_IP):21001". An IPv6 address before a colon gets
// brackets.
//
// The package is a module of its own, so that nobody else compiles client-go. It only needs the rights to list and
// watch; see manifests/rbac.yaml.
package kubernetes
