# The same tokens scored by transformers and by the inference engine.
rule consistency:
    input:
        # After the agents: the server has then been seen to work under load.
        RUN.agents / "accepted.json",
        endpoint=RUN.endpoint(SERVER),
        assets=RUN.assets / "assets.json",
    output:
        verdict=RUN.consistency / "verdict.json",
        page=report(
            RUN.consistency / "report.html",
            caption="../report/consistency.rst",
            category="3 Consistency",
            labels={"result": "token comparison"},
        ),
        ran=RUN.consistency / "ran",
    log:
        LOGS / "consistency.log",
    conda:
        "../envs/shakedown.yaml"
    resources:
        **placement(),
        gpu=0,
        exclude_file=str(RUN.bad_nodes),
    params:
        section=section("consistency", "serve", "model", "data", "seed"),
        out=RUN.consistency,
        config=RUN.config,
    shell:
        "{{ shakedown compare --config {params.config:q} --endpoint {input.endpoint:q} "
        "--out {params.out:q} "
        "|| [ -s {output.verdict:q} ]; }} 2>&1 | tee {log:q}; touch {output.ran:q} {output.page:q}"


rule accept_consistency:
    input:
        verdict=rules.consistency.output.verdict,
        ran=rules.consistency.output.ran,
    output:
        RUN.consistency / "accepted.json",
    log:
        LOGS / "accept_consistency.log",
    localrule: True
    conda:
        "../envs/shakedown.yaml"
    shell:
        "shakedown accept {input.verdict:q} --remove-on-fail {input.ran:q} --out {output:q} 2>&1 | tee {log:q}"
