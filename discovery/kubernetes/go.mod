module github.com/pdkit/pdkit/discovery/kubernetes

go 1.26.0

require (
	github.com/pdkit/pdkit v0.0.0-00010101000000-000000000000
	k8s.io/api v0.36.3
	k8s.io/apimachinery v0.36.3
	k8s.io/client-go v0.36.3
)

replace github.com/pdkit/pdkit => ../../
