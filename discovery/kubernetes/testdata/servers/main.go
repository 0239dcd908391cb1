// SPDX-License-Identifier: Apache-2.0

// Kubeservers is one binary with etcd, kube-apiserver, kube-controller-manager and helm, since linking one binary takes
// less time than four. Each runs as a process of its own.
//
//	kubeservers etcd|kube-apiserver|kube-controller-manager|helm [ARGUMENT...]
package main

import (
	"fmt"
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	helm "helm.sh/helm/v4/pkg/cmd"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
)

func main() {
	name := ""
	if len(os.Args) > 1 {
		name = os.Args[1]
	}
	switch name {
	case "etcd":
		etcdmain.Main(os.Args[1:])
	case "kube-apiserver":
		cmd := apiserver.NewAPIServerCommand()
		cmd.SetArgs(os.Args[2:])
		os.Exit(cli.Run(cmd))
	case "kube-controller-manager":
		cmd := controllers.NewControllerManagerCommand()
		cmd.SetArgs(os.Args[2:])
		os.Exit(cli.Run(cmd))
	case "helm":
		cmd, err := helm.NewRootCmd(os.Stdout, os.Args[2:], helm.SetupLogging)
		if err == nil {
			cmd.SetArgs(os.Args[2:])
			err = cmd.Execute()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "helm:", err)
			os.Exit(1)
		}
	default:
		fmt.Fprintln(os.Stderr, "usage: kubeservers etcd|kube-apiserver|kube-controller-manager|helm [ARGUMENT...]")
		os.Exit(2)
	}
}
