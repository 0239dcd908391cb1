module example.com/ticket

go 1.26.0

require github.com/pdkit/pdkit v0.0.0

require (
	github.com/tidwall/gjson v1.20.0 // indirect
	github.com/tidwall/match v1.1.1 // indirect
	github.com/tidwall/pretty v1.2.0 // indirect
	github.com/tidwall/sjson v1.2.5 // indirect
)

replace github.com/pdkit/pdkit => ../../../..
