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
// If each data-parallel rank of a pod has a port of its own (vLLM's --data-parallel-multi-port-external-lb),
// Options.Ports or the annotation pdkit.dev/ports lists the ports in the order of the ranks: "8000-8007". Each is an
// endpoint; an annotation pdkit.dev/NAME.PORT is the attribute NAME of that endpoint alone. Of the pods of a
// LeaderWorkerSet the label worker-index tells the number of the pod's first rank: the index times the ranks of one
// pod, which are its ports, else its attribute dpSizeLocal, else dpSize. It becomes the attribute dpStartRank, by which
// connectors find the ports of a rank (see connector/attr). The hosts of all pods of a group become the attribute pods.
//
// The package is a module of its own, so that nobody else compiles client-go. It only needs the rights to list and
// watch; see manifests/rbac.yaml.
package kubernetes
