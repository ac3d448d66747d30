# The persistent inference server with its idle limit, and its end when nothing needs it any more.
rule serve:
    input:
        RUN.preflight.accepted,
        assets=RUN.assets.file,
    output:
        RUN.server(SERVER).endpoint,
    log:
        LOGS / "serve.log",
    localrule: True
    conda:
        "../envs/shakedown.yaml"
    params:
        section=section("serve", "model"),
        config=RUN.config,
        out=RUN.server(SERVER).root,
        bad_nodes=RUN.excluded_nodes,
    shell:
        "shakedown serve start --config {params.config:q} --assets {input.assets:q} "
        "--out {params.out:q} --launcher $SHAKEDOWN_LAUNCHER --bad-nodes {params.bad_nodes:q} "
        "2>&1 | tee {log:q}"


rule release_server:
    input:
        RUN.agents.accepted,
        RUN.consistency.accepted,
        [RUN.stage(name).accepted for name in STAGES if uses_server(name)],
    output:
        touch(RUN.server(SERVER).released),
    log:
        LOGS / "release_server.log",
    localrule: True
    conda:
        "../envs/shakedown.yaml"
    params:
        out=RUN.server(SERVER).root,
        keep=CONFIG.serve.keep,
    shell:
        "if [ {params.keep:q} = False ]; then shakedown serve stop {params.out:q}; fi 2>&1 | tee {log:q}"
